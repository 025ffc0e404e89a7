# SPDX-License-Identifier: MIT
"""SASRec as a ranking tower: causal self-attention over the history, the newest state to rank.

Source: Kang and McAuley, Self-Attentive Sequential Recommendation, ICDM 2018, equations 1-6. A
block maps events with learned places by

    x + Dropout(SA(LayerNorm(x))), then x + Dropout(FFN(LayerNorm(x))),

where SA is one causal head, softmax(QKᵀ/√D) V, without an output map, and FFN is ReLU(x W_1 + b_1)
W_2 + b_2 of width D. The state of the newest event F_t scores an item by F_tᵀ e (equation 6).

Differs: the paper learns the next item against sampled ones at every position; here the ranking
loss of the target alone trains it, and the state meets the target as `ranking.py` says. Places
count from the newest event, as the paper's do by padding on the left. A norm after the last block
is as in the authors' code. An example without events has the state 0.

Shapes: B examples, F fields, L columns of events, V targets, D token width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from models.attention.attention import attention, causal_mask, hide_padding
from models.attention.padding import PaddedHistory, read_stream
from models.baselines.sequences.ranking import meet, width
from models.layers import LayerNorm, xavier_linear
from models.stream import Stream
from models.tower import StreamTowerConfig, Tower


@dataclass(frozen=True, kw_only=True)
class SASRecConfig(StreamTowerConfig):
    """SASRec's settings.

    Args:
        num_layers: blocks, at least 1.
        dropout: probability, of events and after both parts of a block.
    """

    num_layers: int = 2
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.num_layers < 1 or self.max_length < 1 or not 0 <= self.dropout < 1:
            raise ValueError(
                "sasrec: num_layers and max_length must be positive and dropout in [0, 1); got "
                f"{self.num_layers}, {self.max_length} and {self.dropout}"
            )

    def build(self, num_fields: int, token_dim: int) -> SASRec:
        """Return the tower for streams of `num_fields` fields and width `token_dim`."""
        return SASRec(self, num_fields, token_dim)


class SASRec(Tower):
    """The newest state beside target and fields: (B, V, (F + 3)·D)."""

    def __init__(self, config: SASRecConfig, num_fields: int, token_dim: int) -> None:
        super().__init__()
        self.config, self.num_fields, self.token_dim = config, num_fields, token_dim
        self.output_dim = width(num_fields, token_dim)
        self.history = PaddedHistory(config.max_length, token_dim, config.num_actions)
        self.blocks = nn.ModuleList(
            SASRecBlock(token_dim, config.dropout) for _ in range(config.num_layers)
        )
        self.norm = LayerNorm(token_dim)

    def forward(self, stream: Stream) -> Tensor:
        """Return the outputs (B, V, (F + 3)·D) at the targets.

        Raises ValueError if the stream does not fit the tower's fields, width or actions.
        """
        config = self.config
        stream = read_stream(stream, self.num_fields, self.token_dim, config.num_actions, "sasrec")
        events, present = self.history(stream)
        # A column before all, which stands for no event: the newest state always exists.
        events = functional.pad(events, (0, 0, 1, 0))
        present = functional.pad(present, (1, 0))
        if config.dropout:
            events = functional.dropout(events, config.dropout, self.training)
        mask = hide_padding(causal_mask(events.shape[1], events.device), present)
        for block in self.blocks:
            events = block(events, mask)
        state = self.norm(events[:, -1]) * present[:, -1:]
        return meet(stream.fields, state, stream.targets)


class SASRecBlock(nn.Module):
    """One block, (B, L, D) to (B, L, D)."""

    measured_as = "layer"

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm, self.ffn_norm = LayerNorm(dim), LayerNorm(dim)
        self.query, self.key, self.value = (xavier_linear(dim, dim, bias=False) for _ in range(3))
        self.up, self.down = xavier_linear(dim, dim), xavier_linear(dim, dim)

    def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
        """Return (B, L, D) of (B, L, D). mask: (B, 1, L, L)."""
        normed = self.attention_norm(rows)
        heads = (one(normed)[:, None] for one in (self.query, self.key, self.value))
        rows = rows + self._drop(attention(*heads, mask=mask)[:, 0])
        hidden = functional.relu(self.up(self.ffn_norm(rows)))
        return rows + self._drop(self.down(hidden))

    def _drop(self, rows: Tensor) -> Tensor:
        return functional.dropout(rows, self.dropout, self.training) if self.dropout else rows
