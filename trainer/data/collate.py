# SPDX-License-Identifier: MIT
"""Arrow records -> Batch: ids become table rows, lists become jagged values, nulls become masks.

`to_batch` does all of it in one call. A loader does it in two steps, because arrays travel between
processes and batches do not: `Collator` runs in a worker, `assemble` in the training process.

Shapes: B rows, F sparse features, C dense features, K labels, N values of all lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.schema.lifetime import MISSING_ID
from embeddings.schema.schema import Schema
from models.batch import Batch
from trainer.data.block import BatchArrays
from trainer.data.collator import Collator


def to_batch(
    records: pa.RecordBatch | pa.Table, schema: Schema, counts: Counter[str] | None = None
) -> Batch:
    """Convert B rows to a Batch on the CPU.

    Args:
        records: B rows with the columns of `schema`.
        schema: which columns become which features.
        counts: if given, gains the number of out-of-range `identity` values by feature (`count`).

    Raises:
        ValueError: a column is missing or has a wrong type.
        RowError: (a ValueError) a value is out of range; a label is not 0 or 1; the sequences of
            one history, or ids and their weights, differ in length; a weight is not finite; a user
            or timestamp is null. The message names feature, column, value and row.
    """
    return assemble(Collator(schema)(records, counts), schema)


def assemble(arrays: BatchArrays | Sequence[torch.Tensor], schema: Schema) -> Batch:
    """Return the Batch that shares the memory of `arrays`.

    Args:
        arrays: a `BatchArrays`, or tensors in the same order.
        schema: names the sparse features.
    """
    if isinstance(arrays, BatchArrays):
        arrays = [torch.from_numpy(array) for array in arrays.fields()]
    values, factors, lengths, dense, labels, weights, groups, actions, day = arrays
    return Batch(
        sparse=KeyedJaggedTensor(
            keys=[feature.name for feature in schema.sparse],
            values=values,
            # Present even in a batch without ids: all ranks must exchange the same tensors.
            weights=factors if schema.has_weights else None,
            lengths=lengths.view(-1),  # (F, B) -> (F * B,), feature by feature
        ),
        dense=dense,
        labels=labels,
        weights=weights,
        groups=groups,
        actions=actions,
        day=int(day),
    )


def empty_batch(schema: Schema) -> Batch:
    """Return a batch of no rows."""
    num_labels = len(schema.labels)
    arrays = BatchArrays(
        values=np.empty(0, np.int64),
        factors=np.empty(0, np.float32),
        lengths=np.empty((len(schema.sparse), 0), np.int32),
        dense=np.empty((0, len(schema.dense)), np.float32),
        labels=np.empty((0, num_labels), np.float32),
        weights=np.empty((0, num_labels), np.float32),
        groups=np.empty(0, np.int64),
        actions=np.empty(0, np.int64),
        day=np.zeros(1, np.int64),
    )
    return assemble(arrays, schema)


def pad_batch(batch: Batch, num_examples: int, schema: Schema) -> Batch:
    """Append rows of weight 0 until the batch has `num_examples` rows, earlier padding included.

    A padding row holds the missing id (row 0, or `MISSING_ID`) in each `id` feature, empty lists
    and zeros.

    Args:
        batch: the batch to pad.
        num_examples: rows of the result.
        schema: kinds and tables of the sparse features.

    Raises:
        ValueError: the batch is already longer.
    """
    missing = num_examples - batch.labels.shape[0]
    if missing < 0:
        raise ValueError(
            f"pad_batch: expected at most {num_examples} rows, got {batch.labels.shape[0]}"
        )
    if not missing:
        return batch
    sparse, values, lengths = batch.sparse, [], []
    old_factors, factors = sparse.weights_or_none(), []
    # (F + 1,): the values of feature i are values[bounds[i] : bounds[i + 1]].
    bounds = np.concatenate(([0], np.cumsum(sparse.length_per_key()))).tolist()
    old_lengths = sparse.lengths().view(len(schema.sparse), -1)  # (F, B)
    for i, feature in enumerate(schema.sparse):
        is_id = int(feature.kind == "id")
        values += [
            sparse.values()[bounds[i] : bounds[i + 1]],
            sparse.values().new_full(
                (missing * is_id,), MISSING_ID if schema.table(feature.table).dynamic else 0
            ),
        ]
        lengths += [old_lengths[i], old_lengths.new_full((missing,), is_id)]
        if old_factors is not None:
            factors += [
                old_factors[bounds[i] : bounds[i + 1]],
                old_factors.new_ones(missing * is_id),
            ]

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])

    return replace(
        batch,
        sparse=KeyedJaggedTensor(
            keys=sparse.keys(),
            values=torch.cat(values),
            weights=torch.cat(factors) if factors else None,
            lengths=torch.cat(lengths),
        ),
        dense=pad(batch.dense),
        labels=pad(batch.labels),
        weights=pad(batch.weights),
        groups=pad(batch.groups),
        num_padding=batch.num_padding + missing,
    )
