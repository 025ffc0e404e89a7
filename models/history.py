# SPDX-License-Identifier: MIT
"""The context of a stream, packed: fields, separators and jagged histories without padding.

`build_context` lays the contexts of all examples one after another and says of each row what it is.
Only the attention call needs a rectangle: a `Grid` pads rows so that all contexts *end* in the same
column, where the distance of two columns is the distance of their tokens and one window fits all.

Shapes: B examples, F fields, N events, D token width, P packed rows, S grid columns, H heads,
d head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from models.stream import Stream


class Rows(NamedTuple):
    """What the P rows are; each field is (P,).

    example: which example owns the row. from_end: 1 for the last row of a context, counting
    backwards. position: rotary position. event: index into the stream's events for item rows, else
    -1. is_field: whether it is a field.
    """

    example: Tensor
    from_end: Tensor
    position: Tensor
    event: Tensor
    is_field: Tensor

    def select(self, index: Tensor) -> Rows:
        """Return the rows at `index`."""
        return Rows(*(part.index_select(0, index) for part in self))


class Packed(NamedTuple):
    """The contexts of B examples.

    tokens: (P, D). rows: what they are. counts: (B,) events used. lengths: (B,) rows of each
    context. longest: the largest length. num_fields: F. tokens_per_event: 2 with action tokens,
    else 1.
    """

    tokens: Tensor
    rows: Rows
    counts: Tensor
    lengths: Tensor
    longest: int
    num_fields: int
    tokens_per_event: int


def build_context(
    stream: Stream,
    separator: Tensor,
    action_table: Tensor | None,
    max_length: int,
    closing_separator: bool,
) -> Packed:
    """Pack `[fields, SEP, (item, action) ..., SEP]` of every example, without loops over examples.

    separator: (1, D). action_table: (classes, D), read by stream.actions. max_length: newest events
    of each history that are kept. closing_separator: whether the second SEP is there.
    Positions: 0 for fields and the first SEP, t for the t-th event kept and its action, one more
    than the last event for the second SEP.
    """
    num_examples, num_fields, dim = stream.fields.shape
    device = stream.fields.device
    per_event = 1 if action_table is None else 2
    counts = stream.offsets.diff().clamp_max(max_length)
    lengths = num_fields + 1 + per_event * counts + int(closing_separator)
    ends = lengths.cumsum(0)
    example = torch.repeat_interleave(lengths)
    from_end = ends[example] - torch.arange(len(example), device=device)
    index = lengths[example] - from_end
    is_field = index < num_fields
    # Rows after the first separator, in events.
    after = index - num_fields - 1
    event = after.div(per_event, rounding_mode="floor")
    in_history = (after >= 0) & (event < counts[example])
    is_action = in_history & (after % per_event == 1)
    global_event = (stream.offsets[1:] - counts)[example] + event
    separator_row = num_examples * num_fields
    source = torch.where(is_field, example * num_fields + index, separator_row)
    source = torch.where(in_history, separator_row + 1 + global_event, source)
    tables = [stream.fields.reshape(-1, dim), separator, stream.events]
    if action_table is not None and stream.actions is not None:
        # One entry more, so that rows which are no action may look anywhere.
        actions = functional.pad(stream.actions, (0, 1))
        chosen = actions[torch.where(is_action, global_event, -1)]
        first_action = separator_row + 1 + len(stream.events)
        source = torch.where(is_action, first_action + chosen, source)
        tables.append(action_table)
    rows = Rows(
        example=example,
        from_end=from_end,
        position=(event + 1).clamp_min(0),
        event=torch.where(in_history & ~is_action, global_event, -1),
        is_field=is_field,
    )
    tokens = torch.cat(tables).index_select(0, source)
    return Packed(tokens, rows, counts, lengths, int(lengths.max()), num_fields, per_event)


class Grid(NamedTuple):
    """A rectangle of B x S columns in which contexts end together.

    target: (P,) flat cell of each row. from_end: (S,) distance of each column from the end.
    lengths: (B,) an example fills the columns with from_end <= its length.
    num_fields: how many of an example's first columns are fields. ragged: whether any cell is
    empty.
    """

    target: Tensor
    from_end: Tensor
    lengths: Tensor
    num_fields: int
    ragged: bool

    @staticmethod
    def of(rows: Rows, lengths: Tensor, size: int, step: int = 1, num_fields: int = 0) -> Grid:
        """Return the grid of `size` columns for rows whose from_end are multiples of `step`."""
        column = size - rows.from_end.div(step, rounding_mode="floor")
        from_end = step * torch.arange(size, 0, -1, device=column.device)
        ragged = bool((lengths < size * step).any())
        return Grid(rows.example * size + column, from_end, lengths, num_fields, ragged)

    def pad(self, heads: Tensor) -> Tensor:
        """Return (B, H, S, d) of (P, H, d), zero where there is no row."""
        num_examples, size = len(self.lengths), len(self.from_end)
        padded = heads.new_zeros(num_examples * size, *heads.shape[1:])
        padded.index_copy_(0, self.target, heads)
        return padded.unflatten(0, (num_examples, size)).transpose(1, 2)

    def unpad(self, heads: Tensor) -> Tensor:
        """Return (P, H·d) of (B, H, S, d)."""
        return heads.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, self.target)

    def present(self) -> Tensor | None:
        """Return (B, S), True where there is a row, or None if there is one everywhere."""
        return self.from_end <= self.lengths[:, None] if self.ragged else None

    def fields(self) -> Tensor:
        """Return (B, S), True where the row is a field."""
        place = self.lengths[:, None] - self.from_end
        return (place >= 0) & (place < self.num_fields)

    def sees(self, keys: Grid, window: int | None, bidirectional_fields: bool) -> Tensor:
        """Return which columns of `keys` this grid's columns see, broadcast to (B, 1, Q, S).

        window: in tokens, itself included; None for all earlier ones.
        """
        distance = keys.from_end - self.from_end[:, None]
        visible = distance >= 0
        if window is not None:
            visible = visible & (distance < window)
        present = keys.present()
        if present is not None:
            visible = visible & present[:, None, None, :]
        if bidirectional_fields and self.num_fields:
            visible = visible | (self.fields()[:, None, :, None] & keys.fields()[:, None, None, :])
        return visible


class Past(NamedTuple):
    """What targets see of one layer: keys and values (B, H, S, d), and which are there (B, S).

    present is None if all are.
    """

    key: Tensor
    value: Tensor
    present: Tensor | None

    def tail(self, window: int | None) -> Past:
        """Return the part that a row right after the context sees through a window of `window`."""
        size = self.key.shape[2]
        if window is None or size < window:
            return self
        first = size - (window - 1)
        present = None if self.present is None else self.present[:, first:]
        return Past(self.key[:, :, first:], self.value[:, :, first:], present)
