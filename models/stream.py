# SPDX-License-Identifier: MIT
"""What a tower reads: field tokens, or one stream of fields, history and targets.

Shapes: B examples, F field tokens, V target tokens per example, N events of all histories, D token
width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Stream(NamedTuple):
    """Fields, jagged history and targets of B examples (TokenFormer's input, seed equations 6-8).

    Args:
        fields: (B, F, D) static tokens.
        events: (N, D) history item tokens of all examples one after another, oldest first in each.
        offsets: (B + 1,) int64; example b owns events offsets[b] to offsets[b + 1] - 1.
        actions: (N,) int64 class of the action on each event (bit k: the k-th label), or None.
        targets: (B, V, D) the items to score; candidates of one example never see each other.
    """

    fields: Tensor
    events: Tensor
    offsets: Tensor
    actions: Tensor | None
    targets: Tensor


class UserOutputs(NamedTuple):
    """Outputs of a tower that learns from the history too.

    Args:
        items: (M, D) at the history items used, in the order of the stream's events.
        events: (M,) int64, which events these are: all N unless a history exceeds max_length.
        targets: (B, V, D).
    """

    items: Tensor
    events: Tensor
    targets: Tensor
