# SPDX-License-Identifier: MIT
"""A trained model as a function from columns to probabilities, in one process.

    scorer = Scorer.load("runs/mine")
    scorer({"user_id": [7], "item_id": [3], "clicked": [[1, 2]], "price": [9.5]})
    {"click": array([0.0731], dtype=float32)}

A scorer has no state that a call changes, so threads may share one.

Shapes: N rows, K tasks, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from models.ranking import RankingModel
from trainer.config.config import TrainConfig
from trainer.data.collate import assemble
from trainer.data.collator import Collator
from trainer.data.columns import RowError, check_columns
from trainer.data.files import LogFile, check_families
from trainer.data.frames import as_file, to_table
from trainer.distributed.precision import DTYPES
from trainer.evaluation.evaluate import read_config
from trainer.serving.exported import is_export, load_export
from trainer.serving.model import Parts, autocast, load_whole, model_version, predict, side_columns
from trainer.serving.proof import TOLERANCES, difference, proof_rows
from trainer.warm_start.policies import resolve

BATCH_ROWS = 4096
VECTORS = ("representation", "item", "user")
Scores = dict[str, NDArray[np.float32]]


class Scorer:
    """Predicts rows by one model.

    Attributes:
        tasks: names of the K labels.
        columns: that rows must have; others are ignored.
        version: of the model.

    Args:
        model: in evaluation mode, on the CPU.
        config: of the run that trained it.
        families: of the training log, by column: `text`, `date` or `number`.
        version: of the model.
        batch_rows: rows that are computed at a time, which bounds the memory of a call.

    Raises:
        ValueError: no rows at a time, or a number format that no run records.
    """

    def __init__(
        self,
        model: RankingModel,
        config: TrainConfig,
        families: dict[str, str],
        version: str,
        batch_rows: int = BATCH_ROWS,
    ) -> None:
        if batch_rows < 1:
            raise ValueError(f"batch_rows: expected at least 1, got {batch_rows}")
        if config.precision.dtype not in DTYPES:
            raise ValueError(
                f"{version}: precision.dtype: expected one of {list(DTYPES)}, as a run records it, "
                f"got {config.precision.dtype!r}; its configuration has been changed: write it "
                "again, or use another checkpoint"
            )
        self.model, self.config, self.version = model.eval(), config, version
        self.tasks = tuple(label.name for label in config.schema.labels)
        self._schema = config.schema.without_labels()
        self.columns = self._schema.columns
        self._collate = Collator(self._schema)
        self._batch_rows = batch_rows
        self._origin: tuple[Path, tuple[Path, ...]] | None = None
        trained = tuple(families.items())
        self._trained = LogFile(path="the training log", row_group_rows=(), families=trained)
        sides = side_columns(config)
        self._pooled = sum(map(len, sides.values()))  # P
        self._sides = {name: torch.tensor(one, dtype=torch.int64) for name, one in sides.items()}

    @classmethod
    def load(
        cls,
        path: str | Path,
        batch_rows: int = BATCH_ROWS,
        deltas: Sequence[str | Path] = (),
    ) -> Scorer:
        """Return the scorer of an exported model, a run's newest checkpoint or one checkpoint.

        Nothing of the folder is executed. A tower of another package must be imported first, or
        announced by an installed package.

        Args:
            path: the folder of an exported model, of a run or of a checkpoint.
            batch_rows: rows that are computed at a time.
            deltas: of an exported model, what has changed since, in order.

        Raises:
            ValueError: no model there, a damaged one, or one too large for the free memory; or an
                exported one whose fixed rows get other scores here.
        """
        if is_export(path):
            model, config, manifest = load_export(path, deltas)
            found = cls(model, config, manifest["families"], manifest["model"], batch_rows)
            found._origin = (Path(path), tuple(map(Path, deltas)))
            rows = proof_rows(found._schema, manifest["families"])
            moved = difference(manifest["proof"], found(rows))
            limit = TOLERANCES[config.precision.dtype]
            if moved > limit:
                raise ValueError(
                    f"{path}: proof: expected the scores of the fixed rows within {limit:g}, "
                    f"got a difference of {moved:g}; its weights are not those that were exported: "
                    "export the model again"
                )
            return found
        if deltas:
            raise ValueError(f"{path}: deltas belong to exported models, and this is none")
        place = resolve(path)
        config, manifest = read_config(place)
        model = load_whole(place, config)
        return cls(model, config, manifest["families"], model_version(manifest), batch_rows)

    def updated(self, delta: str | Path) -> Scorer:
        """Return the scorer of the newer model that a delta leads to; this one is as it was.

        Whoever serves goes on with this one meanwhile and then changes over in one assignment, so
        that no request waits and none sees both models. Until then memory holds both.

        Raises:
            ValueError: as `load`; the delta is of another model, or this one was not exported.
        """
        if self._origin is None:
            raise ValueError(f"{delta}: a delta changes an exported model, and this is none")
        path, before = self._origin
        return self.load(path, self._batch_rows, (*before, delta))

    def __call__(self, columns: Any) -> Scores:
        """Return the probabilities of each task, (N,) float32 by name.

        Args:
            columns: N rows: an Arrow table or record batch, a data frame of pandas or polars, or a
                mapping of names to lists. Labels are not needed.

        Raises:
            ValueError: a column is missing or of a wrong type, or a value is none that the schema
                allows; the message names column, value and row.
        """
        parts = self._predict(to_table(columns, self._schema))
        found = torch.cat([one.probabilities for one in parts]).numpy()  # (N, K)
        return {name: np.ascontiguousarray(found[:, i]) for i, name in enumerate(self.tasks)}

    def embed(self, columns: Any, vectors: Sequence[str] = VECTORS[:1]) -> Scores:
        """Return vectors of N rows, (N, D) float32 each, by name.

        Args:
            columns: as for a call.
            vectors: `representation`, what the tower gives to the head; `item` and `user`, the
                table vectors of the features of that side, side by side in the schema's order.

        Raises:
            ValueError: as for a call; an unknown name, or a side without features.
        """
        check_vectors(vectors, self.config)
        parts = self._predict(to_table(columns, self._schema))
        return {
            name: torch.cat([self._vector(one, name) for one in parts]).numpy() for name in vectors
        }

    def _vector(self, parts: Parts, name: str) -> torch.Tensor:
        if name == "representation":
            return parts.representation
        return parts.pooled.index_select(1, self._sides[name])

    def _predict(self, rows: pa.Table) -> list[Parts]:
        """Return what the model makes of each `batch_rows` rows; of none, one empty part."""
        check_columns(rows.schema, self._schema, "columns")
        check_families((self._trained, as_file(rows, self._schema, "columns")))
        if not rows.num_rows:
            widths = (len(self.tasks), self.model.tower.output_dim, self._pooled)
            return [Parts(*(torch.zeros(0, width) for width in widths))]
        found = []
        for first in range(0, rows.num_rows, self._batch_rows):
            part = rows.slice(first, self._batch_rows)
            try:
                batch = assemble(self._collate(part), self._schema)
            except RowError as error:
                raise RowError(error.message, first + error.row) from error
            with torch.no_grad(), autocast(self.config, torch.device("cpu")):
                found.append(predict(self.model, batch))
        return found


def check_vectors(vectors: Sequence[str], config: TrainConfig) -> None:
    """Refuse names of vectors that the model of `config` does not have.

    Raises:
        ValueError: an unknown name, or a side without features.
    """
    sides = side_columns(config)
    for name in vectors:
        if name not in VECTORS:
            raise ValueError(f"embeddings: expected some of {', '.join(VECTORS)}, got {name!r}")
        if name != "representation" and not sides[name]:
            side = "item" if name == "item" else "context"
            raise ValueError(
                f"embeddings: {name!r} is of features with side {side!r}, of which the schema has "
                "none (beside sequences); leave it out, or ask for 'representation'"
            )
