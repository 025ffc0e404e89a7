# SPDX-License-Identifier: MIT
# pyright: reportIncompatibleMethodOverride=false
"""TokenFormer's block: rotary attention, a non-linear gate on it, SwiGLU (equations 9-19).

The block has three parts (keys and values, queries and gate, finish) because the tower computes
keys for more rows than queries. `forward` combines them where all rows need both.

Shapes: B examples, Q rows, S earlier rows, D token width, H heads, d = D / H head width; "..." is
any number of leading dimensions.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.attention.attention import attention
from models.layers import GainRMSNorm, SwiGLU, xavier_linear

Gate = Literal["xavier", "zero", "none"]
OutputProjection = Literal["none", "before_gate", "after_gate"]
Rotation = tuple[Tensor, Tensor]


def rotation_table(num_positions: int, head_dim: int, base: float, like: Tensor) -> Rotation:
    """Return cosines and sines (num_positions, d/2) of the rotary angles, in `like`'s dtype.

    Pair k at position m is rotated by m · base^(-2k/d). Angles are computed in float64.

    Args:
        num_positions: rows of the table.
        head_dim: head width d, even.
        base: base of the frequencies.
        like: tensor whose device and dtype the table takes.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=like.device)
    positions = torch.arange(num_positions, dtype=torch.float64, device=like.device)
    angles = positions[:, None] * base ** (-pairs / head_dim)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Return the heads, rotated by the angles of their rows.

    Coordinate k is paired with k + d/2 (half-split layout).

    Args:
        heads: (..., H, d).
        rotation: cosines and sines, (..., 1, d/2) each.
    """
    turned = _Rotate.apply(heads, *rotation)
    assert isinstance(turned, Tensor)
    return turned


class _Rotate(torch.autograd.Function):
    """Rotation with the inverse rotation as its gradient; saves only cosines and sines."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(heads, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    turned = torch.empty_like(heads, memory_format=torch.contiguous_format)
    left, right = turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right).addcmul_(first, sin)
    return turned


class InteractionBlock(nn.Module):
    """Unified interaction block: (B, Q, D) to (B, Q, D).

    Queries, keys, values and gate read the RMS-normed rows. Residuals add to the raw rows.

    Args:
        dim: token width D.
        num_heads: attention heads H.
        hidden: hidden width of the SwiGLU feed-forward.
        gate: initial weights of NLIR's `sigmoid(x Wg) ⊙ attention`, or `none` for no gate.
        output_projection: (D, D) projection of the attention before or after the gate, or `none`.
    """

    measured_as = "layer"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        hidden: int,
        gate: Gate = "xavier",
        output_projection: OutputProjection = "none",
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.gated = gate != "none"
        self.project_first = output_projection == "before_gate"
        self.attention_norm = GainRMSNorm(dim, eps=1e-6)
        self.key_value = xavier_linear(dim, 2 * dim, bias=False)
        self.query_gate = xavier_linear(dim, 2 * dim if self.gated else dim, bias=False)
        self.output = xavier_linear(dim, dim, bias=False) if output_projection != "none" else None
        self.ffn_norm = GainRMSNorm(dim, eps=1e-6)
        self.ffn = SwiGLU(dim, hidden)
        # Projections that share one matrix start as separate Xavier-initialized projections.
        nn.init.normal_(self.key_value.weight, std=dim**-0.5)
        nn.init.normal_(self.query_gate.weight, std=dim**-0.5)
        if gate == "zero":
            nn.init.zeros_(self.query_gate.weight[dim:])

    def forward(
        self,
        rows: Tensor,
        rotation: Rotation,
        mask: Tensor | None = None,
        past: Rotation | None = None,
    ) -> Tensor:
        """Return (B, Q, D) of (B, Q, D) rows that attend to themselves and to earlier rows.

        Args:
            rows: (B, Q, D).
            rotation: cosines and sines of the rows, each broadcast to (B, Q, 1, d/2).
            mask: boolean, broadcast to (B, H, Q, S + Q), earlier rows first.
            past: keys and values (B, H, S, d) of the earlier rows.
        """
        normed = self.attention_norm(rows)
        key, value = (part.transpose(1, 2) for part in self.keys_values(normed, rotation))
        query, gate = self.queries_gate(normed, rotation)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        attended = attention(query.transpose(1, 2), key, value, mask=mask)
        return self.finish(rows, attended.transpose(1, 2).flatten(-2), gate)

    def keys_values(self, normed: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values, each (..., H, d), of normed rows (..., D)."""
        key, value = self.key_value(normed).chunk(2, dim=-1)
        key, value = (part.unflatten(-1, (self.num_heads, -1)) for part in (key, value))
        return rotate(key, rotation), value

    def queries_gate(self, normed: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor | None]:
        """Return rotated queries (..., H, d) and the gate (..., D), if there is one."""
        projected = self.query_gate(normed)
        query, gate = projected.chunk(2, dim=-1) if self.gated else (projected, None)
        query = query.unflatten(-1, (self.num_heads, -1))
        return rotate(query, rotation), None if gate is None else gate.sigmoid()

    def finish(self, rows: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        """Return (..., D): rows plus gated attention, plus the feed-forward (equations 16-19)."""
        if self.output is not None and self.project_first:
            attended = self.output(attended)
        if gate is not None:
            attended = gate * attended
        if self.output is not None and not self.project_first:
            attended = self.output(attended)
        rows = rows + attended
        return rows + self.ffn(self.ffn_norm(rows))
