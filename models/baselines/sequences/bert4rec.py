# SPDX-License-Identifier: MIT
"""BERT4Rec as a ranking tower: attention in both directions, the state of a mask after the history.

Source: Sun et al., BERT4Rec, CIKM 2019, equations 1-7. The rows are the events with learned places,
and one [mask] after them, which stands for the item to be predicted. A layer is

    A = LayerNorm(X + Dropout(MH(X))),   LayerNorm(A + Dropout(PFFN(A))),

where MH are H heads softmax(QKᵀ/√(D/H)) V with an output map, and PFFN is GELU(x W_1 + b_1) W_2 +
b_2 of width 4D. The [mask]'s state h gives GELU(h W_P + b_P), which scores an item by its product
with the item's vector (equation 7).

Differs: the paper masks random items of the history and learns to fill them in (Cloze); here the
ranking loss of the target alone trains it, with the [mask] where the paper has it in testing, and
the state meets the target as `ranking.py` says. The bias of an item is left to the fields.

Shapes: B examples, F fields, L columns of events, V targets, D token width, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.attention.attention import attention
from models.attention.padding import PaddedHistory, read_stream
from models.baselines.sequences.ranking import meet, width
from models.layers import LayerNorm, xavier_linear
from models.stream import Stream
from models.tower import StreamTowerConfig, Tower


@dataclass(frozen=True, kw_only=True)
class BERT4RecConfig(StreamTowerConfig):
    """BERT4Rec's settings.

    Args:
        num_layers: layers, at least 1.
        num_heads: H, which divides the token width.
        dropout: probability, of the rows and after both parts of a layer.
    """

    num_layers: int = 2
    num_heads: int = 2
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        if min(self.num_layers, self.num_heads, self.max_length) < 1 or not 0 <= self.dropout < 1:
            raise ValueError(
                "bert4rec: num_layers, num_heads and max_length must be positive and dropout in "
                f"[0, 1); got {self.num_layers}, {self.num_heads}, {self.max_length} and "
                f"{self.dropout}"
            )

    def build(self, num_fields: int, token_dim: int) -> BERT4Rec:
        """Return the tower for streams of `num_fields` fields and width `token_dim`.

        Raises ValueError if the heads do not split the token's width.
        """
        if token_dim % self.num_heads:
            raise ValueError(
                f"bert4rec: the token width must be a multiple of num_heads, got {token_dim} and "
                f"num_heads={self.num_heads}"
            )
        return BERT4Rec(self, num_fields, token_dim)


class BERT4Rec(Tower):
    """The mask's state beside target and fields: (B, V, (F + 3)·D)."""

    def __init__(self, config: BERT4RecConfig, num_fields: int, token_dim: int) -> None:
        super().__init__()
        self.config, self.num_fields, self.token_dim = config, num_fields, token_dim
        self.output_dim = width(num_fields, token_dim)
        self.history = PaddedHistory(config.max_length, token_dim, config.num_actions)
        self.mask = nn.Parameter(torch.randn(1, 1, token_dim) * 0.02)
        self.layers = nn.ModuleList(
            BERT4RecLayer(token_dim, config.num_heads, config.dropout)
            for _ in range(config.num_layers)
        )
        self.project = xavier_linear(token_dim, token_dim)

    def forward(self, stream: Stream) -> Tensor:
        """Return the outputs (B, V, (F + 3)·D) at the targets.

        Raises ValueError if the stream does not fit the tower's fields, width or actions.
        """
        config = self.config
        stream = read_stream(
            stream, self.num_fields, self.token_dim, config.num_actions, "bert4rec"
        )
        events, present = self.history(stream)
        rows = torch.cat([events, self.mask.expand(len(events), -1, -1)], dim=1)
        if config.dropout:
            rows = functional.dropout(rows, config.dropout, self.training)
        seen = functional.pad(present, (0, 1), value=True)[:, None, None]  # (B, 1, 1, L + 1)
        for layer in self.layers:
            rows = layer(rows, seen)
        state = functional.gelu(self.project(rows[:, -1]))
        return meet(stream.fields, state, stream.targets)


class BERT4RecLayer(nn.Module):
    """One layer, (B, L, D) to (B, L, D)."""

    measured_as = "layer"

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.query, self.key, self.value, self.output = (xavier_linear(dim, dim) for _ in range(4))
        self.up, self.down = xavier_linear(dim, 4 * dim), xavier_linear(4 * dim, dim)
        self.attention_norm, self.ffn_norm = LayerNorm(dim), LayerNorm(dim)

    def forward(self, rows: Tensor, seen: Tensor) -> Tensor:
        """Return (B, L, D) of (B, L, D). seen: (B, 1, 1, L)."""
        heads = (
            one(rows).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        attended = attention(*heads, mask=seen).transpose(1, 2).flatten(2)
        rows = self.attention_norm(rows + self._drop(self.output(attended)))
        return self.ffn_norm(rows + self._drop(self.down(functional.gelu(self.up(rows)))))

    def _drop(self, rows: Tensor) -> Tensor:
        return functional.dropout(rows, self.dropout, self.training) if self.dropout else rows
