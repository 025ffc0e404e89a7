# SPDX-License-Identifier: MIT
"""The context of a stream, packed: fields, separators and jagged histories without padding.

`build_context` concatenates the contexts of all examples and describes each row (`Rows`). Layers
run on the packed rows (`jagged.py`). Only the keys and values that targets attend to are padded,
because all targets of an example read them together: one `Past` per layer. In sliding layers a
`Past` holds only the rows of the window.

Shapes: B examples, F fields, N events, D token width, P packed rows, S columns, H heads, d head
width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from models.attention.jagged import Band, Grid, offsets_of
from models.stream import Stream


class Rows(NamedTuple):
    """Description of the P packed rows; each field is (P,).

    Args:
        example: int64 index of the example that owns the row.
        from_end: distance from the end of its context; 1 for the last row.
        position: rotary position.
        event: index into the stream's events for item rows, else -1.
        is_field: whether the row is a field token.
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

    Args:
        tokens: (P, D) token vectors.
        rows: description of the P rows.
        counts: (B,) events used of each history.
        lengths: (B,) rows of each context.
        longest: largest of `lengths`.
        num_fields: F.
        tokens_per_event: 2 with action tokens, else 1.
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

    Positions are 0 for fields and the first SEP, t for the t-th event kept and its action, and one
    more than the last event for the second SEP.

    Args:
        stream: fields, events and offsets of B examples.
        separator: (1, D) vector of SEP.
        action_table: (classes, D) vectors that stream.actions selects; None without action tokens.
        max_length: newest events of each history that are kept.
        closing_separator: whether the second SEP is there.

    Raises:
        ValueError: offsets, events, actions and fields do not belong together.
    """
    num_examples, num_fields, dim = stream.fields.shape
    device = stream.fields.device
    per_event = 1 if action_table is None else 2
    most_events = _check(stream, 0 if action_table is None else len(action_table))
    counts = stream.offsets.diff().clamp_max(max_length)
    lengths = num_fields + 1 + per_event * counts + int(closing_separator)
    ends = lengths.cumsum(0)  # (B,)
    example = torch.repeat_interleave(lengths)  # (P,)
    from_end = ends[example] - torch.arange(len(example), device=device)
    index = lengths[example] - from_end  # (P,) place in its own context, from 0
    is_field = index < num_fields
    after = index - num_fields - 1  # rows after the first separator
    event = after.div(per_event, rounding_mode="floor")
    in_history = (after >= 0) & (event < counts[example])
    is_action = in_history & (after % per_event == 1)
    global_event = (stream.offsets[1:] - counts)[example] + event
    # Each row reads one row of cat([fields, SEP, events, action_table]).
    separator_row = num_examples * num_fields
    source = torch.where(is_field, example * num_fields + index, separator_row)
    source = torch.where(in_history, separator_row + 1 + global_event, source)
    tables = [stream.fields.reshape(-1, dim), separator, stream.events]
    if action_table is not None and stream.actions is not None:
        # The extra last entry is read by rows that are not actions.
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
    longest = num_fields + 1 + per_event * min(most_events, max_length) + int(closing_separator)
    return Packed(tokens, rows, counts, lengths, longest, num_fields, per_event)


def _check(stream: Stream, num_actions: int) -> int:
    """Return the number of events of the longest history.

    All values are read from the device in one transfer.

    Raises:
        ValueError: the parts of the stream do not belong together.
    """
    num_examples, num_events = len(stream.fields), len(stream.events)
    if stream.offsets.shape != (num_examples + 1,):
        raise ValueError(
            f"stream: expected {num_examples + 1} offsets for the fields of {num_examples} "
            f"examples, got {tuple(stream.offsets.shape)}"
        )
    if stream.actions is not None and stream.actions.shape != (num_events,):
        raise ValueError(
            f"stream: expected one action an event, ({num_events},), got "
            f"{tuple(stream.actions.shape)}; a log's actions are aligned with its events"
        )
    if not num_examples:
        return 0
    counts = stream.offsets.diff()
    facts = [counts.max(), counts.min(), stream.offsets[0], stream.offsets[-1]]
    if stream.actions is not None and num_events:
        facts += [stream.actions.min(), stream.actions.max()]
    longest, shortest, first, last, *actions = torch.stack(facts).tolist()
    if shortest < 0 or first != 0 or last != num_events:
        raise ValueError(
            f"stream: expected offsets that rise from 0 to the number of events, {num_events}; got "
            f"{first} to {last}, shortest history {shortest}"
        )
    if actions and (actions[0] < 0 or actions[1] >= num_actions):
        raise ValueError(
            f"stream: expected actions from 0 to {num_actions - 1}, got {actions[0]} to "
            f"{actions[1]}; set the tower's num_actions to the number of action classes"
        )
    return longest


class Past(NamedTuple):
    """Keys and values of one layer that targets attend to.

    Args:
        key: (B, H, S, d).
        value: (B, H, S, d).
        present: (B, S), whether a column holds a row; None if all do.
    """

    key: Tensor
    value: Tensor
    present: Tensor | None

    @staticmethod
    def of(key: Tensor, value: Tensor, band: Band) -> Past:
        """Return the keys and values that a row right after each example would see.

        Args:
            key: (P, H, d).
            value: (P, H, d).
            band: offsets of the rows, and the window.
        """
        offsets, size, num_rows = band.offsets, band.longest, len(key)
        num_examples = len(offsets) - 1
        if band.window is not None and band.window <= size:
            size = band.window - 1
        if num_rows == num_examples * band.longest:
            grid = Grid(None, num_examples, band.longest)
            return Past(grid.pad(key)[:, :, -size:], grid.pad(value)[:, :, -size:], None)
        lengths = offsets.diff()
        if size < band.longest:
            rows = torch.arange(num_rows, device=offsets.device)
            ends = torch.repeat_interleave(offsets[1:], lengths, output_size=num_rows)
            newest = (ends - rows <= size).nonzero()[:, 0]  # rows within the window
            key, value = key.index_select(0, newest), value.index_select(0, newest)
            lengths = lengths.clamp_max(size)
        grid = Grid.ending_together(offsets_of(lengths), len(key), size)
        place = torch.arange(size, 0, -1, device=offsets.device)  # (S,) distance from the end
        present = None if grid.cell is None else place <= lengths[:, None]
        return Past(grid.pad(key), grid.pad(value), present)
