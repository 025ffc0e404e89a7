# SPDX-License-Identifier: MIT
"""TokenFormer: fields, history and targets as one stream (equations 6-21 of the TokenFormer paper).

The stream of an example is `[fields, SEP, (item, action) ..., SEP, targets]` (`impression`) or
`[fields, SEP, (item, action) ..., next item]` (`user_centric`), in one decoder. The first layers
are causal over all of it, the later ones see sliding windows of it and no fields.

Nothing before the targets ever sees a target, so the tower is two passes: `encode` runs the context
and keeps each layer's keys and values, `score` runs any number of targets against them, none of
which sees another. The split is exact; a server may encode a user once and score candidates as they
come.

Histories stay jagged: the layers run on the packed (P, D) context, attention too where its kernel
takes packed rows (`attention.py`). A row is computed only as long as something still to come reads
it: fields end with the last full layer, and in `impression` mode a sliding layer keeps just the
tail that the windows above it reach.

Shapes: B examples, F fields, N events, V targets, D token width, P packed context tokens, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from models.attention.attention import attention, describe
from models.attention.jagged import Band, offsets_of
from models.attention.padding import read_stream
from models.layers import check_choices, widen
from models.stream import Stream, UserOutputs
from models.tower import StreamTowerConfig, Tower
from models.towers.history import Packed, Past, Rows, build_context
from models.towers.interaction import (
    Gate,
    InteractionBlock,
    OutputProjection,
    Rotation,
    rotation_table,
)

Mode = Literal["impression", "user_centric"]


@dataclass(frozen=True, kw_only=True)
class TokenFormerConfig(StreamTowerConfig):
    """TokenFormer's settings.

    Args:
        mode: `impression` scores targets after the history; `user_centric` also returns outputs at
            every item of the history, none of which sees its own action or a later one.
        num_layers: layers in all.
        num_full_layers: the first layers, which see everything before a token.
        windows: how many tokens, itself included, a token of each other layer sees.
        num_heads: attention heads.
        expansion: hidden width of the feed-forward over D.
        static_bidirectional: whether fields see each other both ways (the paper: causal), so that
            their order does not matter.
        gate: start of the NLIR gate's weights, `xavier` or `zero` (a gate of ½); `none`: no gate.
        output_projection: `none` (the paper), or a square map `before_gate` or `after_gate`.
        right_align: whether the newest event has position max_length whatever the history's length.
        rope_base: base of the rotary positions.
    """

    mode: Mode = "impression"
    num_layers: int = 4
    num_full_layers: int = 2
    windows: tuple[int, ...] = (32, 16)
    num_heads: int = 2
    expansion: float = 4.0
    static_bidirectional: bool = False
    gate: Gate = "xavier"
    output_projection: OutputProjection = "none"
    right_align: bool = False
    rope_base: float = 1e4

    def __post_init__(self) -> None:
        """Check the fields, alone and together."""
        check_choices(self, "tokenformer")
        if not 1 <= self.num_full_layers <= self.num_layers:
            raise ValueError(
                "tokenformer: num_full_layers must be between 1 (only full layers read fields) and "
                f"num_layers={self.num_layers}, got {self.num_full_layers}"
            )
        if len(self.windows) != self.num_layers - self.num_full_layers:
            raise ValueError(
                "tokenformer: windows needs one entry a sliding layer, expected "
                f"{self.num_layers - self.num_full_layers}, got {self.windows}"
            )
        if min(self.windows, default=2) < 2:
            raise ValueError(
                f"tokenformer: a window counts the token itself; use 2 or more, got {self.windows}"
            )
        if self.max_length < 1:
            raise ValueError(f"tokenformer: max_length must be positive, got {self.max_length}")

    @property
    def learns_from_history(self) -> bool:
        """Whether outputs at past items are returned too."""
        return self.mode == "user_centric"

    def build(self, num_fields: int, token_dim: int) -> TokenFormer:
        """Return the tower for streams of `num_fields` fields and width `token_dim`.

        Raises ValueError if the heads do not split the width into even parts.
        """
        if token_dim % (2 * self.num_heads):
            raise ValueError(
                "tokenformer: the token width must be a multiple of 2 * num_heads (rotary "
                f"positions turn pairs), got {token_dim} and num_heads={self.num_heads}"
            )
        return TokenFormer(self, num_fields, token_dim)


class Context(NamedTuple):
    """What targets read of the encoded fields and histories.

    layers: one `Past` a layer. positions: (B,) int64 rotary position of an example's targets.
    items: (M, D) outputs at the M history items used, and events: (M,) int64, which of the stream's
    events they are; None in `impression` mode.
    """

    layers: list[Past]
    positions: Tensor
    items: Tensor | None = None
    events: Tensor | None = None


class TokenFormer(Tower):
    """Decoder over streams: (B, V, D) target outputs, or `UserOutputs` in `user_centric` mode."""

    def __init__(self, config: TokenFormerConfig, num_fields: int, token_dim: int) -> None:
        super().__init__()
        self.config = config
        self.num_fields = num_fields
        self.output_dim = token_dim
        self.separator = nn.Parameter(torch.randn(1, token_dim) * 0.02)
        actions = torch.randn(config.num_actions, token_dim) * 0.02
        self.actions = nn.Parameter(actions) if config.num_actions else None
        hidden = round(config.expansion * token_dim)
        self.layers = nn.ModuleList(
            InteractionBlock(
                token_dim, config.num_heads, hidden, config.gate, config.output_projection
            )
            for _ in range(config.num_layers)
        )
        self.windows: list[int | None] = [None] * config.num_full_layers + list(config.windows)

    def fsdp_units(self) -> list[nn.Module]:
        """Return no parts: the tower calls pieces of its blocks, so all are gathered together."""
        return []

    def describe(self, device: torch.device, dtype: torch.dtype) -> list[str]:
        """Return which attention kernels the tower takes."""
        return [describe(device, dtype, self.output_dim // self.config.num_heads)]

    def forward(self, stream: Stream) -> Tensor | UserOutputs:
        """Return the outputs at the targets, in `user_centric` mode also at the history's items.

        Raises ValueError if the stream does not fit the tower's fields, width or actions.
        """
        context = self.encode(stream)
        targets = self.score(context, stream.targets)
        if context.items is None or context.events is None:
            return targets
        return UserOutputs(context.items, context.events, targets)

    def encode(self, stream: Stream) -> Context:
        """Run everything before the targets, which are not read.

        Raises ValueError if the stream does not fit the tower's fields, width or actions.
        """
        config = self.config
        stream = read_stream(
            stream, self.num_fields, self.output_dim, config.num_actions, "tokenformer"
        )
        user_centric = config.mode == "user_centric"
        packed = build_context(
            stream, self.separator, self.actions, config.max_length, not user_centric
        )
        rows, x_PD = self._place(packed), packed.tokens
        table = self._rotations(x_PD)
        layers: list[Past] = []
        for number, block in enumerate(self.layers):
            assert isinstance(block, InteractionBlock)
            normed = block.attention_norm(x_PD)  # (P, D)
            rotation = _of_rows(table, rows)
            key, value = block.keys_values(normed, rotation)  # (P, H, D / H) each
            band = self._band(number, packed)
            layers.append(Past.of(key, value, band))
            if number + 1 == config.num_layers and not user_centric:
                break
            kept = self._kept(number, rows)
            if kept is not None:
                x_PD, normed = x_PD.index_select(0, kept), normed.index_select(0, kept)
                rows = rows.select(kept)
                rotation = _of_rows(table, rows)
                band = self._asked(band, number, packed, kept)
            query, gate = block.queries_gate(normed, rotation)
            attended = attention(query, key, value, mask=band)  # (P kept, H, D / H)
            x_PD = block.finish(x_PD, attended.flatten(-2), gate)
        last = torch.full_like(packed.counts, config.max_length + 1)
        positions = packed.counts + 1 if user_centric and not config.right_align else last
        if user_centric:
            return Context(layers, positions, x_PD, rows.event)
        return Context(layers, positions)

    def score(self, context: Context, targets: Tensor) -> Tensor:
        """Return (B, V, D) outputs of (B, V, D) targets, each blind to the others.

        Raises ValueError if the targets are not those of the context's examples, or of other width.
        """
        num_targets, expected = targets.shape[1], (len(context.positions), self.output_dim)
        if (targets.shape[0], targets.shape[2]) != expected:
            raise ValueError(
                f"tokenformer: expected targets of shape ({expected[0]}, V, {expected[1]}), got "
                f"{tuple(targets.shape)}; score the examples that were encoded, in their order"
            )
        targets = widen(targets, "tokenformer")
        table = self._rotations(targets)
        cos, sin = (part.index_select(0, context.positions)[:, None, None] for part in table)
        own = torch.eye(num_targets, dtype=torch.bool, device=targets.device)
        for block, past in zip(self.layers, context.layers, strict=True):
            mask = None
            if past.present is not None or num_targets > 1:
                size = past.key.shape[2]
                seen = own.new_ones(1, size) if past.present is None else past.present
                seen = seen[:, None, None].expand(-1, -1, num_targets, -1)
                # (B or 1, 1, V, S + V): the context's columns, then the target itself
                mask = torch.cat([seen, own.expand(len(seen), 1, -1, -1)], dim=-1)
            targets = block(targets, (cos, sin), mask, (past.key, past.value))
        return targets

    def _rotations(self, like: Tensor) -> Rotation:
        config = self.config
        head_dim = self.output_dim // config.num_heads
        return rotation_table(config.max_length + 2, head_dim, config.rope_base, like)

    def _place(self, packed: Packed) -> Rows:
        """Return the rows with their final positions."""
        rows = packed.rows
        if not self.config.right_align:
            return rows
        shift = (self.config.max_length - packed.counts)[rows.example]
        return rows._replace(position=rows.position + shift * (rows.position > 0))

    def _reach(self, number: int) -> int | None:
        """Return how many last rows of a context layer `number` reads; None for all."""
        reach: int | None = 0 if self.config.mode == "impression" else None
        for window in reversed(self.windows[number:]):
            reach = None if reach is None or window is None else reach + window - 1
        return reach

    def _band(self, number: int, packed: Packed) -> Band:
        """Return which rows that enter layer `number` see which."""
        window, reach = self.windows[number], self._reach(number)
        full = number < self.config.num_full_layers
        dropped = 0 if full else self.num_fields
        lengths, longest = packed.lengths - dropped, packed.longest - dropped
        if reach is not None and reach < longest:
            lengths, longest = lengths.clamp_max(reach), reach
        mutual = self.num_fields if full and self.config.static_bidirectional else 0
        return Band(offsets_of(lengths), longest, window, mutual)

    def _asked(self, band: Band, number: int, packed: Packed, kept: Tensor) -> Band:
        """Return the band of layer `number` in which the rows `kept` ask alone."""
        following = number + 1
        if following == self.config.num_layers:
            items = (packed.longest - self.num_fields - 1) // packed.tokens_per_event
            return band._replace(queries=kept, most=items)
        most = self._band(following, packed).longest
        return band._replace(queries=kept, most=most, are_last=True)

    def _kept(self, number: int, rows: Rows) -> Tensor | None:
        """Return which rows layer `number` must put out, None for all."""
        following = number + 1
        if following == self.config.num_layers:
            return (rows.event >= 0).nonzero()[:, 0]
        if following < self.config.num_full_layers:
            return None
        reach = self._reach(following)
        if following > self.config.num_full_layers and reach is None:
            return None
        keep = ~rows.is_field
        if reach is not None:
            keep = keep & (rows.from_end <= reach)
        return keep.nonzero()[:, 0]


def _of_rows(table: Rotation, rows: Rows) -> Rotation:
    cos, sin = (part.index_select(0, rows.position)[:, None] for part in table)
    return cos, sin
