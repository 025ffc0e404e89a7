# SPDX-License-Identifier: MIT
"""Ids on their way to the tables, and the kernels that look them up.

Sharded collections of every kind need these few functions, so they depend on no table of ours.

Shapes: R ranks, F features of B examples, N ids, U unique ids of all features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def lookup_modules(module: ShardedModule[Any, Any, Any, Any]) -> Iterator[nn.Module]:
    """Yield all parts of a sharded module's lookups.

    TorchRec keeps its lookups in a list, so they are no submodules of anything.
    """
    lookups: Any = getattr(module, "_lookups", ())
    for lookup in lookups:
        yield from lookup.modules()


def without_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the same ids without weights; no tensor is copied."""
    if features.weights_or_none() is None:
        return features
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),  # (N,)
        lengths=features.lengths(),  # (F * B,)
        stride=features.stride(),  # B
        # Given here, so that no collection computes them again, which would synchronize a GPU.
        length_per_key=features.length_per_key(),
        offset_per_key=features.offset_per_key(),
    )


def unique_ids(features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Tensor, Tensor]:
    """Return the unique ids of each feature, where they stood, and how often each occurred.

    The U ids are spread evenly over the B lists of a feature; which list holds which id has no
    meaning.

    Args:
        features: F features of B lists each, N ids in all.

    Returns:
        The U unique ids as F features of B lists; (N,) int64, for each id of `features` its
        position among the unique ones; (U,) int64, how often each occurred.
    """
    size = features.stride()  # B
    lengths_FB = features.lengths().view(-1, size).long()
    values_N = features.values()
    feature_N = torch.arange(lengths_FB.shape[0], device=values_N.device)  # (F,)
    feature_N = feature_N.repeat_interleave(lengths_FB.sum(1))  # (N,) which feature an id is of
    low, high = map(int, values_N.aminmax()) if values_N.numel() else (0, 0)
    span, ids = high - low + 1, None
    if span * lengths_FB.shape[0] >= 2**63:  # ids of all 64 bits: number them first
        ids, values_N = torch.unique(values_N, return_inverse=True)
        low, span = 0, len(ids)
    # One key a pair of feature and id. Ids outside every table stay what they are, negative ones
    # too, for the lookup to refuse.
    keys_U, reverse_N, often_U = torch.unique(
        feature_N * span + (values_N - low), return_inverse=True, return_counts=True
    )
    found_U = keys_U % span + low if ids is None else ids[keys_U % span]
    counts_F = torch.bincount(keys_U // span, minlength=lengths_FB.shape[0])
    spread_FB = counts_F[:, None] // size + (
        torch.arange(size, device=values_N.device) < counts_F[:, None] % size
    )
    unique = KeyedJaggedTensor(
        keys=features.keys(),
        values=found_U.to(features.values().dtype),
        lengths=spread_FB.flatten().to(features.lengths().dtype),
    )
    return unique, reverse_N, often_U
