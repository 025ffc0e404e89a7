# SPDX-License-Identifier: MIT
"""OneTrans: one causal transformer over the history and the fields, with weights of two kinds.

The tokens are `[events, fields, target]`, each seeing what stands before it. Events share their
queries, keys, values and feed-forward, since they are all the same thing; every field and the
target has its own. A layer is pre-RMSNorm attention with an output map, then pre-RMSNorm
feed-forward, both residual. The pyramid: after each layer only the newest half of the events go on,
having gathered what was before them.

From the paper's description, no authors' code being public. Ours where it says nothing: learned
places of events (`padding.py`), GELU, no biases in the attention, the target's last state as
output. Targets of one example never see each other, and the last layer computes nothing but them.

Shapes: B examples, F fields, L columns of events, V targets, D token width, H heads, S = L + F + V
positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.attention.attention import attention, causal_mask, hide_padding, isolate_candidates
from models.attention.padding import PaddedHistory, read_stream
from models.layers import GainRMSNorm, PerTokenFFN, PerTokenLinear, check_choices, xavier_linear
from models.stream import Stream
from models.tower import StreamTowerConfig, Tower

_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class OneTransConfig(StreamTowerConfig):
    """OneTrans' settings.

    Args:
        num_layers: layers.
        num_heads: attention heads.
        expansion: hidden width of the feed-forwards over D.
        pyramid: `halving` keeps max_length / 2, / 4, ... newest events after each layer; `none`
            keeps all.
    """

    num_layers: int = 2
    num_heads: int = 2
    expansion: float = 4.0
    pyramid: Literal["halving", "none"] = "halving"

    def __post_init__(self) -> None:
        """Check the fields."""
        check_choices(self, "onetrans")
        for name in ("num_layers", "num_heads", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"onetrans: {name} must be positive, got {getattr(self, name)}")
        if self.expansion <= 0 or self.num_actions < 0:
            raise ValueError(
                "onetrans: expansion must be positive and num_actions not negative, got "
                f"{self.expansion} and {self.num_actions}"
            )

    def build(self, num_fields: int, token_dim: int) -> OneTrans:
        """Return the tower for streams of `num_fields` fields and width `token_dim`.

        Raises ValueError if the heads do not split the width.
        """
        if token_dim % self.num_heads:
            raise ValueError(
                "onetrans: the token width must be a multiple of num_heads, got "
                f"{token_dim} and num_heads={self.num_heads}"
            )
        return OneTrans(self, num_fields, token_dim)


class OneTrans(Tower):
    """Causal transformer over streams: (B, V, D) target outputs."""

    def __init__(self, config: OneTransConfig, num_fields: int, token_dim: int) -> None:
        super().__init__()
        self.config = config
        self.num_fields = num_fields
        self.output_dim = token_dim
        self.history = PaddedHistory(config.max_length, token_dim, config.num_actions)
        last = config.num_layers - 1
        self.layers = nn.ModuleList(
            OneTransLayer(config, num_fields, token_dim, last=number == last)
            for number in range(config.num_layers)
        )
        self.norm = GainRMSNorm(token_dim, eps=_EPS)

    def forward(self, stream: Stream) -> Tensor:
        """Return the outputs (B, V, D) at the targets.

        Raises ValueError if the stream does not fit the tower's fields, width or actions.
        """
        config, num_targets = self.config, stream.targets.shape[1]
        stream = read_stream(
            stream, self.num_fields, self.output_dim, config.num_actions, "onetrans"
        )
        events, present = self.history(stream)
        own = torch.cat([stream.fields, stream.targets], dim=1)  # (B, F + V, D)
        num_own = own.shape[1]
        mask = causal_mask(present.shape[1] + num_own, own.device)
        valid = torch.cat([present, present.new_ones(len(present), num_own)], dim=1)
        mask = hide_padding(isolate_candidates(mask, num_targets), valid)  # (B, 1, S, S)
        for number, layer in enumerate(self.layers):
            kept = config.max_length >> (number + 1 if config.pyramid == "halving" else 0)
            kept = 0 if number + 1 == config.num_layers else min(kept, events.shape[1])
            num_keys = events.shape[1] + own.shape[1]
            num_queries = kept + own.shape[1] if number + 1 < config.num_layers else num_targets
            seen = mask[:, :, mask.shape[2] - num_queries :, mask.shape[3] - num_keys :]
            events, own = layer(events, own, seen, kept, num_targets)
        return self.norm(own)


class OneTransLayer(nn.Module):
    """One layer: events (B, L, D) and own tokens (B, F + V, D) to the rows that go on.

    last: computes the targets alone.
    """

    def __init__(
        self, config: OneTransConfig, num_fields: int, token_dim: int, *, last: bool
    ) -> None:
        super().__init__()
        dim, hidden = token_dim, round(config.expansion * token_dim)
        slots = 1 if last else num_fields + 1
        self.num_heads, self.last = config.num_heads, last
        self.attention_norm = GainRMSNorm(dim, eps=_EPS)
        self.key_value = xavier_linear(dim, 2 * dim, bias=False)
        self.own_key_value = PerTokenLinear(num_fields + 1, dim, 2 * dim, bias=False)
        self.query = None if last else xavier_linear(dim, dim, bias=False)
        self.own_query = PerTokenLinear(slots, dim, dim, bias=False)
        self.output = xavier_linear(dim, dim, bias=False)
        self.ffn_norm = GainRMSNorm(dim, eps=_EPS)
        self.up = None if last else xavier_linear(dim, hidden)
        self.down = None if last else xavier_linear(hidden, dim)
        self.own_ffn = PerTokenFFN(slots, dim, hidden)
        # Keys and values share a product and start as maps of their own.
        nn.init.normal_(self.key_value.weight, std=dim**-0.5)
        nn.init.normal_(self.own_key_value.weight, std=dim**-0.5)

    def forward(
        self, events: Tensor, own: Tensor, mask: Tensor, kept: int, num_targets: int
    ) -> tuple[Tensor, Tensor]:
        """Return the newest `kept` events and the own tokens, or the targets, after the layer.

        mask: (B, 1, Q, K), which keys the rows that go on see.
        """
        normed, own_normed = self.attention_norm(events), self.attention_norm(own)
        keys = self._own(self.own_key_value, own_normed, num_targets)
        keys = torch.cat([self.key_value(normed), keys], dim=1)  # (B, K, 2D)
        first = events.shape[1] - kept
        if self.last:
            own, own_normed = own[:, -num_targets:], own_normed[:, -num_targets:]
        queries = self._own(self.own_query, own_normed, num_targets)
        if self.query is not None:
            queries = torch.cat([self.query(normed[:, first:]), queries], dim=1)
        key, value = (self._heads(part) for part in keys.chunk(2, dim=-1))
        attended = attention(self._heads(queries), key, value, mask=mask)
        attended = self.output(attended.transpose(1, 2).flatten(2))  # (B, Q, D)
        own = own + attended[:, kept:]
        own = own + self.own_ffn(self.ffn_norm(own), self._slots(own, num_targets))
        if self.up is None or self.down is None:
            return events[:, :0], own
        events = events[:, first:] + attended[:, :kept]
        hidden = functional.gelu(self.up(self.ffn_norm(events)))
        return events + self.down(hidden), own

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def _own(self, layer: PerTokenLinear, rows: Tensor, num_targets: int) -> Tensor:
        return layer(rows.transpose(0, 1), self._slots(rows, num_targets)).transpose(0, 1)

    def _slots(self, rows: Tensor, num_targets: int) -> Tensor | None:
        """Return whose weights the rows use: all targets use the last."""
        if num_targets == 1:
            return None
        return torch.arange(rows.shape[1], device=rows.device).clamp_max(
            rows.shape[1] - num_targets
        )
