# SPDX-License-Identifier: MIT
"""HSTU: attention without softmax, gated by its own input, over context, history and targets.

A layer maps the LayerNorm of its rows to u, v, q, k at once. A query's weights are
`silu(q kᵀ / √A) / S`, not normalised, so that how much was seen is not lost; the output is
`X + [SiLU(u), a, SiLU(u) ⊙ LN(a)] W` for the attended values a. There is no feed-forward.

Rows are `[fields, events, targets]`. Fields see each other and the whole history; an event sees the
fields, the events before it and itself; a target sees fields, history and itself.

After Meta's public implementation (equations, epsilons, starts, mask). Ours: learned places of
events (`padding.py`), S as the constant F + max_length + 1, so that an example's score does not
depend on its batch.

Shapes: B examples, F fields, L columns of events, V targets, D token width, H heads, A width of a
head's queries and keys, W of its values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.attention.attention import causal_mask, hide_padding, isolate_candidates
from models.attention.padding import PaddedHistory, read_stream
from models.layers import LayerNorm
from models.stream import Stream
from models.tower import StreamTowerConfig, Tower

_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class HSTUConfig(StreamTowerConfig):
    """HSTU's settings.

    Args:
        num_layers: layers.
        num_heads: H.
        attention_dim: A; 0 for D / H.
        value_dim: W; 0 for D / H.
    """

    num_layers: int = 2
    num_heads: int = 2
    attention_dim: int = 0
    value_dim: int = 0

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in ("num_layers", "num_heads", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"hstu: {name} must be positive, got {getattr(self, name)}")
        for name in ("attention_dim", "value_dim", "num_actions"):
            if getattr(self, name) < 0:
                raise ValueError(f"hstu: {name} must not be negative, got {getattr(self, name)}")

    def build(self, num_fields: int, token_dim: int) -> HSTU:
        """Return the tower for streams of `num_fields` fields and width `token_dim`.

        Raises ValueError if heads without a width of their own do not split the token's.
        """
        if token_dim % self.num_heads and not (self.attention_dim and self.value_dim):
            raise ValueError(
                f"hstu: the token width must be a multiple of num_heads, got {token_dim} and "
                f"num_heads={self.num_heads}; or set attention_dim and value_dim"
            )
        return HSTU(self, num_fields, token_dim)


class HSTU(Tower):
    """HSTU layers over streams: (B, V, D) target outputs."""

    def __init__(self, config: HSTUConfig, num_fields: int, token_dim: int) -> None:
        super().__init__()
        self.config = config
        self.num_fields = num_fields
        self.output_dim = token_dim
        self.history = PaddedHistory(config.max_length, token_dim, config.num_actions)
        length = num_fields + config.max_length + 1
        self.layers = nn.ModuleList(
            HSTULayer(config, token_dim, length) for _ in range(config.num_layers)
        )
        self.norm = LayerNorm(token_dim, eps=_EPS)

    def forward(self, stream: Stream) -> Tensor:
        """Return the outputs (B, V, D) at the targets.

        Raises ValueError if the stream does not fit the tower's fields, width or actions.
        """
        num_targets = stream.targets.shape[1]
        stream = read_stream(
            stream, self.num_fields, self.output_dim, self.config.num_actions, "hstu"
        )
        events, present = self.history(stream)
        rows = torch.cat([stream.fields, events, stream.targets], dim=1)  # (B, F + L + V, D)
        mask = self._mask(present, num_targets)
        for layer in self.layers[:-1]:
            rows = layer(rows, mask, rows.shape[1])
        return self.norm(self.layers[-1](rows, mask[:, :, -num_targets:], num_targets))

    def _mask(self, present: Tensor, num_targets: int) -> Tensor:
        """Return (B, 1, S, S), True where a row (third axis) sees another."""
        num_events = present.shape[1]
        size = self.num_fields + num_events + num_targets
        index = torch.arange(size, device=present.device)
        is_field, is_target = index < self.num_fields, index >= size - num_targets
        seen = isolate_candidates(causal_mask(size, present.device), num_targets)
        seen = seen | (is_field[:, None] & ~is_target)
        valid = functional.pad(present, (self.num_fields, num_targets), value=True)
        return hide_padding(seen, valid)


class HSTULayer(nn.Module):
    """One layer, (B, S, D) to its last rows. length: what attention weights are divided by."""

    measured_as = "layer"

    def __init__(self, config: HSTUConfig, token_dim: int, length: int) -> None:
        super().__init__()
        self.num_heads, self.length = config.num_heads, length
        self.attention_dim = config.attention_dim or token_dim // config.num_heads
        value_dim = config.value_dim or token_dim // config.num_heads
        wide = self.num_heads * value_dim
        narrow = self.num_heads * self.attention_dim
        self.norm = LayerNorm(token_dim, eps=_EPS)
        self.gate_query = nn.Linear(token_dim, wide + narrow)
        self.value_key = nn.Linear(token_dim, wide + narrow)
        self.split = [wide, narrow]
        self.attended_norm = LayerNorm(wide, eps=_EPS)
        self.output = nn.Linear(3 * wide, token_dim, bias=False)
        # Xavier-uniform as the one matrix that both maps are parts of.
        bound = (6 / (token_dim + 2 * (wide + narrow))) ** 0.5
        for linear in (self.gate_query, self.value_key):
            nn.init.uniform_(linear.weight, -bound, bound)
            nn.init.zeros_(linear.bias)
        nn.init.xavier_uniform_(self.output.weight)

    def forward(self, rows: Tensor, mask: Tensor, num_queries: int) -> Tensor:
        """Return the last `num_queries` rows (B, Q, D) after the layer; mask: (B, 1, Q, S)."""
        normed = self.norm(rows)
        first = rows.shape[1] - num_queries
        gate, query = self.gate_query(normed[:, first:]).split(self.split, dim=-1)
        value, key = self.value_key(normed).split(self.split, dim=-1)
        query, key, value = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in (query, key, value)
        )
        # (B, H, Q, S)
        scores = functional.silu(query @ key.mT * self.attention_dim**-0.5) / self.length
        attended = (scores * mask) @ value
        attended = attended.transpose(1, 2).flatten(2)  # (B, Q, H·W)
        gate = functional.silu(gate)
        parts = [gate, attended, gate * self.attended_norm(attended)]
        joined = torch.cat([part.to(attended.dtype) for part in parts], dim=-1)
        return rows[:, first:] + self.output(joined)
