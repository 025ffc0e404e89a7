# SPDX-License-Identifier: MIT
"""Padded histories for the baselines that attend over a history.

TokenFormer packs ragged histories. The baselines pad them at the beginning, so that the newest k
events are the last k columns of every example. An event is the sum of its own vector, the vector of
its action and a position vector. Positions count from the newest event, so padding does not change
them.

Shapes: B examples, F fields, N events, L columns (the longest history of the batch, at most
`max_length`), V targets, D token width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers import widen
from models.stream import Stream


class PaddedHistory(nn.Module):
    """Events of a stream as (B, L, D), newest last, and a mask of the present ones, (B, L).

    Args:
        max_length: number of newest events that are used.
        token_dim: D.
        num_actions: classes of the action on each event; 0 for streams without actions.
        places: whether an event has a position vector.
    """

    def __init__(
        self, max_length: int, token_dim: int, num_actions: int, *, places: bool = True
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.places = nn.Embedding(max_length, token_dim) if places else None
        if self.places is not None:
            nn.init.normal_(self.places.weight, std=0.02)
        self.actions = nn.Embedding(num_actions, token_dim) if num_actions else None
        if self.actions is not None:
            nn.init.normal_(self.actions.weight, std=0.02)

    def forward(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return events (B, L, D), zero where there is none, and the mask (B, L)."""
        offsets = stream.offsets
        longest = min(self.max_length, int(offsets.diff().max()))
        behind = torch.arange(longest, 0, -1, device=offsets.device)  # (L,)
        index = offsets[1:, None] - behind  # (B, L) rows of stream.events
        present = index >= offsets[:-1, None]
        # Padding cells read an extra last row of zeros; it exists even if there is no event.
        missing = len(stream.events)
        index = index.masked_fill(~present, missing).flatten()
        events = functional.pad(stream.events, (0, 0, 0, 1)).index_select(0, index)
        events = events.unflatten(0, present.shape)
        here = present[..., None]
        if self.places is not None:
            events = events + self.places.weight[self.max_length - longest :] * here
        if self.actions is not None and stream.actions is not None:
            actions = functional.pad(stream.actions, (0, 1)).index_select(0, index)
            events = events + self.actions(actions.unflatten(0, present.shape)) * here
        return events, present


def read_stream(
    stream: Stream, num_fields: int, token_dim: int, num_actions: int, tower: str
) -> Stream:
    """Check a stream and widen its half-precision vectors to float32.

    Args:
        stream: the tokenizer's output.
        num_fields: F that the tower was built for.
        token_dim: D that the tower was built for.
        num_actions: classes of actions that the tower was built for.
        tower: name of the tower, for messages.

    Raises:
        ValueError: the stream does not fit the tower's fields, width or actions.
    """
    expected = (num_fields, token_dim)
    if tuple(stream.fields.shape[1:]) != expected or stream.events.shape[1:] != (token_dim,):
        raise ValueError(
            f"{tower}: built for fields of shape (B, {num_fields}, {token_dim}) and events of "
            f"width {token_dim}, got {tuple(stream.fields.shape)} and "
            f"{tuple(stream.events.shape)}; build the tower with the num_fields and token_dim of "
            "the tokenizer that feeds it"
        )
    if (stream.actions is None) != (num_actions == 0):
        raise ValueError(
            f"{tower}: num_actions is {num_actions} but the stream has "
            f"{'no ' if stream.actions is None else ''}actions; set num_actions to the number of "
            "action classes, or to 0 for streams without"
        )
    return stream._replace(
        fields=widen(stream.fields, tower),
        events=widen(stream.events, tower),
        targets=widen(stream.targets, tower),
    )
