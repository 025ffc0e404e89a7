# SPDX-License-Identifier: MIT
"""What an evaluation notes of a model beside its metrics: ranks, spectra, gradients, clusters.

A `Watch` keeps the first rows that a tower reads and gives while predictions are made; afterwards
rank 0 measures them, and all ranks together the tables they hold. Nothing of it runs in a training
step. Records are plain data, as ranks.json holds them: `layer` (from 1, by the first number of the
module's path; 0 for what belongs to none), `module` (the kind of what was measured), `path` (where)
and the values, with `spectrum` where there is one.

Shapes: B examples, T tokens, D width, E rows of a table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from models.diagnostics.clusters import kmeans, mutual_information
from models.diagnostics.rank import (
    cumulative_spectrum,
    diagnose,
    gradient_energy,
    gram_singular_values,
    measure_spectrum,
)
from models.ranking import ImpressionObjective, Predictions
from trainer.distributed.parallelize import Parallel

_DIAGNOSED_ROWS = 256
_CLUSTERED_ROWS = 4096
_NUM_CLUSTERS = 10
# Rows of a table's shard that enter its spectrum, evenly spaced; up to twice as many.
_TABLE_ROWS = 4096


class Watch:
    """The first rows of a tower's input and output, while it is open.

    Attributes:
        inputs: Of the first batch: tokens (B, T, D) or a Stream.
        outputs: Representations (B, D) of the first batches, at most 4,096 rows.
        labels: (B, K) of the same rows.
        weights: (B, K) of the same rows.
    """

    def __init__(self, tower: nn.Module) -> None:
        self.inputs: Any = None
        self.outputs: list[Tensor] = []
        self.labels: list[Tensor] = []
        self.weights: list[Tensor] = []
        self._handle = tower.register_forward_hook(self._keep)

    def __enter__(self) -> Watch:
        """Return the watch, which is open from the start."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the watch; what it holds stays."""
        self._handle.remove()

    def note(self, predictions: Predictions) -> None:
        """Keep the labels of a batch that the tower has read, in the same order."""
        if len(self.labels) < len(self.outputs):
            rows = predictions.num_examples
            self.labels.append(predictions.labels[:rows])
            self.weights.append(predictions.weights[:rows])
            self.outputs[len(self.labels) - 1] = self.outputs[len(self.labels) - 1][:rows]

    def _keep(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self.inputs is None:
            self.inputs = inputs[0]
        if isinstance(output, Tensor) and sum(map(len, self.outputs)) < _CLUSTERED_ROWS:
            self.outputs.append(output.detach().flatten(1).float())


@torch.no_grad()
def diagnose_model(parallel: Parallel, watch: Watch, model: nn.Module) -> list[dict[str, Any]]:
    """Measure the rows of `watch` and the tables. Collective.

    Rank 0 returns the records, the other ranks none. Ranks and gradients are those of rank 0's
    first
    256 rows, clusters of its first 4,096.

    Args:
        parallel: The model on all ranks.
        watch: The rows to measure.
        model: Has the tower and its objective as the first rank can run them alone (`plain_parts`).
    """
    tables = measure_tables(parallel)
    if not _is_first() or watch.inputs is None:
        return []
    tower = model.get_submodule("tower")
    inputs = _first_rows(watch.inputs)
    records = []
    for one in diagnose(tower, inputs):
        number = re.search(r"\d+", one.module)
        layer = int(number[0]) + 1 if number else 0
        records.append(_record(layer, one.kind, one.module, one.values, one.spectrum))
    records += _gradient_records(model, tower, inputs, watch)
    return records + _cluster_records(watch) + tables


def _gradient_records(
    model: nn.Module, tower: nn.Module, inputs: Any, watch: Watch
) -> list[dict[str, Any]]:
    """Return how the loss's gradient at the tokens spreads over their singular directions."""
    objective = model.get_submodule("objective")
    if not (isinstance(inputs, Tensor) and isinstance(objective, ImpressionObjective)):
        return []
    rows = min(len(inputs), len(watch.labels[0]))
    with torch.enable_grad():
        tokens = inputs[:rows].detach().requires_grad_()
        logits = objective.head(tower(tokens)).float()
        loss, _ = objective.task_loss(logits, watch.labels[0][:rows], watch.weights[0][:rows])
        # Of the tokens alone: no weight's gradient is touched, nor any hook on it called.
        (gradient,) = torch.autograd.grad(loss, tokens)
    usable = tokens.isfinite().all() & gradient.isfinite().all() & gradient.any()
    if not rows or not usable:
        return []
    shares = gradient_energy(tokens, gradient)
    values = {f"gradient_share{k}": float(shares[:k].sum()) for k in (1, 4)}
    return [_record(0, "gradient", "inputs", values, shares.cumsum(0).tolist())]


def _cluster_records(watch: Watch) -> list[dict[str, Any]]:
    """Return what the clusters of the tower's outputs know of the first label."""
    if not watch.labels:
        return []
    points = torch.cat(watch.outputs[: len(watch.labels)])[:_CLUSTERED_ROWS]
    labels = torch.cat(watch.labels)[: len(points), 0]
    usable = (torch.cat(watch.weights)[: len(points), 0] > 0) & points.isfinite().all(1)
    points, labels = points[usable], labels[usable]
    if len(points) <= _NUM_CLUSTERS:
        return []
    information, entropy = mutual_information(kmeans(points, _NUM_CLUSTERS), labels)
    values = {"mutual_information": information, "label_entropy": entropy, "rows": len(points)}
    return [_record(0, "clusters", "output", values)]


def measure_tables(parallel: Parallel) -> list[dict[str, Any]]:
    """Return a record of each table's spectrum, from a sample of its rows. Collective.

    Each rank takes at most 8,191 of a shard's rows, evenly spaced. A table that is sharded by
    column is left out, because no rank holds a whole row.
    """
    grams: dict[str, Tensor] = {}
    sides: dict[str, int] = {}
    for name, weight in sorted(parallel.module.state_dict().items()):
        if isinstance(weight, ShardedTensor) and name.endswith(".weight"):
            gram = _gram(weight)
            if gram is not None:
                table = name.removesuffix(".weight").rsplit(".", 1)[-1]
                grams[table], sides[table] = gram, min(weight.metadata().size)
    for gram in grams.values():
        dist.all_reduce(gram)
    records = []
    for table, gram in grams.items():
        sigma = gram_singular_values(gram)[: sides[table]]
        values, spectrum = measure_spectrum(sigma), cumulative_spectrum(sigma)
        records.append(_record(0, "table", table, values, spectrum))
    return records


def _gram(weight: ShardedTensor) -> Tensor | None:
    """Return the sum of xᵀx (D, D) over a sample of this rank's rows x; None if cut by columns."""
    metadata = weight.metadata()
    width = metadata.size[1]
    if any(shard.shard_sizes[1] != width for shard in metadata.shards_metadata):
        return None
    # A rank that holds no row of the table joins the sum all the same, on the group's device.
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    gram = torch.zeros(width, width, dtype=torch.float64, device=device)
    for shard in weight.local_shards():
        rows = shard.tensor[:: max(1, len(shard.tensor) // _TABLE_ROWS)].double()
        gram += (rows.mT @ rows).to(gram.device)
    return gram


def _first_rows(tokens: Any) -> Any:
    """Return the first examples of a tower's input."""
    if isinstance(tokens, Tensor):
        return tokens[:_DIAGNOSED_ROWS]
    rows = min(_DIAGNOSED_ROWS, tokens.fields.shape[0])
    end = int(tokens.offsets[rows])
    return type(tokens)(
        fields=tokens.fields[:rows],
        events=tokens.events[:end],
        offsets=tokens.offsets[: rows + 1],
        actions=None if tokens.actions is None else tokens.actions[:end],
        targets=tokens.targets[:rows],
    )


def _record(
    layer: int, kind: str, path: str, values: dict[str, float], spectrum: Sequence[float] = ()
) -> dict[str, Any]:
    shares = [round(share, 6) for share in spectrum]
    return {"layer": layer, "module": kind, "path": path, **values, "spectrum": shares}


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
