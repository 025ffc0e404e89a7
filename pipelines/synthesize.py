# SPDX-License-Identifier: MIT
"""Generate a click log of several days whose best reachable AUC is known.

  python -m pipelines.synthesize OUTPUT --days 4 --rows-per-day 40000 --seed 7 --start 2026-01-01

writes OUTPUT/dt=YYYY-MM-DD/part-*.parquet as `pipelines.ingest` would, OUTPUT/schema.yaml, and
OUTPUT/ceiling.json: the AUC and logloss that the true probability reaches on the very rows drawn,
for each task, day and overall. No model can do better in expectation, so a training run is judged
by how near it comes. `pipelines/synthetic/click_model.py` states the probability model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml
from numpy.typing import NDArray

from pipelines.ingestion.column_stats import Statistics
from pipelines.ingestion.partition import PartitionConfig
from pipelines.synthetic.click_model import ClickConfig
from pipelines.synthetic.impressions import DENSE, TASKS, to_table
from trainer.recipes.schemas import demo as demo_schema
from trainer.runtime.atomic_files import write_json
from trainer.runtime.program import Parser, program, quiet_pipe


@dataclass(frozen=True, kw_only=True)
class SynthesisConfig:
    """What to generate. `start` is the first day; the population lives before it, unrecorded."""

    days: int = 4
    rows_per_day: int = 40_000
    start: str = "2026-01-01"
    overwrite: bool = False
    clicks: ClickConfig = field(default_factory=ClickConfig)

    def __post_init__(self) -> None:
        """Check the counts and the date."""
        for name in ("days", "rows_per_day"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        try:
            date.fromisoformat(self.start)
        except ValueError as error:
            raise ValueError(f"start must be a date YYYY-MM-DD, got {self.start!r}") from error


def generate(config: SynthesisConfig) -> Iterator[tuple[str, pa.Table, NDArray[np.float64]]]:
    """Yield (day, rows, probabilities) of each day; probabilities is (rows, 2) in [0, 1]."""
    first = datetime.fromisoformat(config.start).replace(tzinfo=UTC)
    burn_in = timedelta(days=1)
    population = config.clicks.build(int((first - burn_in).timestamp() * 1_000))
    # A day nobody sees fills the histories: about eight pages for every user.
    population.run_day(8 * config.clicks.num_users * config.clicks.page_size)
    for number in range(config.days):
        population.end_day()
        pages = population.run_day(config.rows_per_day)
        yield (
            (first + timedelta(days=number)).date().isoformat(),
            to_table(pages),
            pages.probabilities,
        )


def synthesize(output: str | Path, config: SynthesisConfig | None = None) -> dict[str, Any]:
    """Write the log, its schema and its ceiling under `output`; return the summary.

    The summary has `rows` by day, `schema` (path of the YAML) and `ceiling` (as in ceiling.json).

    Raises:
        ValueError: a day exists already and `config.overwrite` is off.
        RuntimeError: another process is writing there.
    """
    config = config or SynthesisConfig()
    output, schema = Path(output), demo_schema()
    drawn: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    statistics = Statistics({*DENSE, *TASKS})
    with PartitionConfig(overwrite=config.overwrite).build(output) as partitions:
        for day, table, probabilities in generate(config):
            partitions.append(day, table)
            statistics.add(day, table)
            labels = np.stack([table.column(task).to_numpy() for task in TASKS], axis=1)
            drawn[day] = (labels.astype(np.float64), probabilities)
        ceiling = _ceilings(drawn)
        schema_path = output / "schema.yaml"
        schema_path.write_text(yaml.safe_dump(schema.to_dict(), sort_keys=False), encoding="utf-8")
        write_json(output / "ceiling.json", ceiling)
        manifest = {"schema": schema.fingerprint(), "source": "pipelines.synthesize"}
        rows = partitions.commit(manifest, statistics.days(output))
    return {"rows": rows, "schema": str(schema_path), "ceiling": ceiling}


def auc(labels: NDArray[np.float64], scores: NDArray[np.float64]) -> float:
    """Return the exact area under the ROC curve of (N,) scores, ties counted half, or NaN."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positives = labels.sum()
    negatives = len(labels) - positives
    if not positives or not negatives:
        return float("nan")
    above = ranks[labels > 0].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def logloss(labels: NDArray[np.float64], probabilities: NDArray[np.float64]) -> float:
    """Return the mean negative log likelihood of (N,) labels, in nats."""
    chosen = np.where(labels > 0, probabilities, 1 - probabilities)
    return float(-np.log(chosen).mean())


def _ceilings(drawn: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]) -> dict[str, Any]:
    labels, probabilities = (np.concatenate(parts) for parts in zip(*drawn.values(), strict=True))
    return {
        "overall": _ceiling(labels, probabilities),
        "days": {day: _ceiling(*pair) for day, pair in drawn.items()},
    }


def _ceiling(labels: NDArray[np.float64], probabilities: NDArray[np.float64]) -> dict[str, Any]:
    return {
        task: {
            "rows": len(labels),
            "rate": float(labels[:, k].mean()),
            "auc": auc(labels[:, k], probabilities[:, k]),
            "logloss": logloss(labels[:, k], probabilities[:, k]),
        }
        for k, task in enumerate(TASKS)
    }


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, generate, print one line a day; return the exit code."""
    parser = Parser(prog=program("pipelines.synthesize"), description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    default, clicks = SynthesisConfig(), ClickConfig()
    parser.add_argument("output", help="folder to write to")
    parser.add_argument("--days", type=int, default=default.days, help="days to generate")
    rows = "impressions of a day"
    parser.add_argument("--rows-per-day", type=int, default=default.rows_per_day, help=rows)
    parser.add_argument("--start", default=default.start, help="first day, YYYY-MM-DD")
    parser.add_argument("--seed", type=int, default=clicks.seed, help="of population and draws")
    parser.add_argument("--users", type=int, default=clicks.num_users, help="users there are")
    parser.add_argument("--items", type=int, default=clicks.num_items, help="items alive on a day")
    parser.add_argument("--overwrite", action="store_true", help="replace days that exist")
    given = parser.parse_args(arguments)
    try:
        config = SynthesisConfig(
            days=given.days,
            rows_per_day=given.rows_per_day,
            start=given.start,
            overwrite=given.overwrite,
            clicks=ClickConfig(num_users=given.users, num_items=given.items, seed=given.seed),
        )
        summary = synthesize(given.output, config)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for day, rows in summary["rows"].items():
        best = summary["ceiling"]["days"][day]
        tasks = ", ".join(f"{task} {best[task]['rate']:.3f}" for task in TASKS)
        print(f"{day}  {rows:,} rows  rates: {tasks}  best click AUC {best['click']['auc']:.4f}")
    print(f"schema {summary['schema']}, ceiling {Path(given.output) / 'ceiling.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))
