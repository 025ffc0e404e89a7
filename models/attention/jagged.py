# SPDX-License-Identifier: MIT
"""Packed rows of ragged examples: their attention mask, and their layout in a padded rectangle.

The rows of all examples are concatenated without padding. A `Band` is their attention mask: a row
attends to earlier rows of its own example, as far back as a window reaches. The mask is a rule, not
a matrix, so that a kernel can skip masked blocks. `Band.mask` builds the matrix for tests. A `Grid`
is the padded rectangle for kernels without ragged inputs. If examples *end* in the same column, the
distance of two columns is the distance of their rows, so one window applies to all examples.

Shapes: B examples, P packed rows, Q query rows among them, S columns, H heads, d head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Band(NamedTuple):
    """Attention mask of packed rows: a row attends to its example up to itself, within a window.

    Args:
        offsets: (B + 1,) int64; example b owns rows offsets[b] to offsets[b + 1] - 1.
        longest: rows of the longest example.
        window: number of rows that a row attends to, itself included; None for all before it.
        num_mutual: leading rows of each example that attend to each other in both directions.
            Every example has at least this many, and there is no window.
        queries: (Q,) int64, ascending indices of the query rows; None if all rows are.
        most: largest number of query rows in one example.
        are_last: whether the query rows of each example are its last rows.
    """

    offsets: Tensor
    longest: int
    window: int | None = None
    num_mutual: int = 0
    queries: Tensor | None = None
    most: int = 0
    are_last: bool = False

    def starts(self, num_rows: int) -> Tensor:
        """Return (P,) the first row of each row's example; num_rows: P."""
        lengths = self.offsets.diff()
        return torch.repeat_interleave(self.offsets[:-1], lengths, output_size=num_rows)

    def sees(self, start: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return whether query rows attend to key rows, as booleans.

        The arguments broadcast together.

        Args:
            start: first row of the query's example.
            query: index of the query row.
            key: index of the key row.
        """
        visible = key <= query
        if self.window is not None:
            visible = visible & (query - key < self.window)
        if self.num_mutual:
            end = start + self.num_mutual
            visible = visible | ((query < end) & (key < end))
        return visible & (key >= start)

    def mask(self, num_rows: int) -> Tensor:
        """Return the rule as a boolean matrix (Q, P); num_rows: P."""
        start, rows = self.starts(num_rows), self.offsets.new_tensor(range(num_rows))
        query = rows if self.queries is None else self.queries
        return self.sees(start[query][:, None], query[:, None], rows)

    def query_offsets(self) -> Tensor:
        """Return (B + 1,): example b owns queries offsets[b] to offsets[b + 1] - 1."""
        if self.queries is None:
            return self.offsets
        return torch.searchsorted(self.queries, self.offsets)

    def spread(self, heads: Tensor, num_rows: int) -> Tensor:
        """Return (P, H, d) of (Q, H, d): each query at its own row, zeros elsewhere."""
        if self.queries is None:
            return heads
        return heads.new_zeros(num_rows, *heads.shape[1:]).index_copy(0, self.queries, heads)

    def gather(self, heads: Tensor) -> Tensor:
        """Return (Q, H, d) of (P, H, d): the query rows."""
        return heads if self.queries is None else heads.index_select(0, self.queries)


class Grid(NamedTuple):
    """A rectangle of B x S cells that holds packed rows.

    Args:
        cell: (P,) flat cell of each row; None if the rows fill the rectangle in order.
    """

    cell: Tensor | None
    num_examples: int
    size: int

    @staticmethod
    def ending_together(offsets: Tensor, num_rows: int, size: int) -> Grid:
        """Return the grid whose last column holds the last row of every example.

        Args:
            offsets: (B + 1,), examples of at most `size` rows each, `num_rows` in all.
        """
        num_examples = len(offsets) - 1
        if num_rows == num_examples * size:
            return Grid(None, num_examples, size)
        rows = torch.arange(num_rows, device=offsets.device)
        # The last row of example b sits in cell (b + 1) * size - 1.
        last = size * torch.arange(1, num_examples + 1, device=offsets.device)
        shift = torch.repeat_interleave(last - offsets[1:], offsets.diff(), output_size=num_rows)
        return Grid(rows + shift, num_examples, size)

    @staticmethod
    def beginning_together(offsets: Tensor, num_rows: int, size: int) -> Grid:
        """Return the grid whose first column holds the first row of every example."""
        num_examples = len(offsets) - 1
        if num_rows == num_examples * size:
            return Grid(None, num_examples, size)
        rows = torch.arange(num_rows, device=offsets.device)
        first = size * torch.arange(num_examples, device=offsets.device)
        shift = torch.repeat_interleave(first - offsets[:-1], offsets.diff(), output_size=num_rows)
        return Grid(rows + shift, num_examples, size)

    def pad(self, heads: Tensor) -> Tensor:
        """Return (B, H, S, d) of (P, H, d), zero where there is no row."""
        return self._cells(heads).unflatten(0, (self.num_examples, self.size)).transpose(1, 2)

    def unpad(self, heads: Tensor) -> Tensor:
        """Return (P, H, d) of (B, H, S, d)."""
        flat = heads.transpose(1, 2).flatten(0, 1)
        return flat if self.cell is None else flat.index_select(0, self.cell)

    def place(self, values: Tensor) -> Tensor:
        """Return (B, S) of (P,), zero where there is no row."""
        return self._cells(values).view(self.num_examples, self.size)

    def _cells(self, rows: Tensor) -> Tensor:
        if self.cell is None:
            return rows
        cells = rows.new_zeros(self.num_examples * self.size, *rows.shape[1:])
        return cells.index_copy(0, self.cell, rows)


def offsets_of(lengths: Tensor) -> Tensor:
    """Return (B + 1,) offsets of (B,) lengths."""
    return functional.pad(lengths.cumsum(0), (1, 0))
