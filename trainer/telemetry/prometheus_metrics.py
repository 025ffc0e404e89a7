# SPDX-License-Identifier: MIT
"""What Prometheus sees of a run: every metric's name, kind, labels and meaning.

One list, `METRICS`, is what the exporter renders, what dashboards and alert rules are checked
against, and what deploy/METRICS.md prints:
python -m trainer.telemetry.prometheus_metrics > deploy/METRICS.md.
Names follow Prometheus' conventions: one prefix, base units (seconds, bytes, shares of one),
`_total` for what only grows. A counter begins at 0 with every process, so that a restart is a reset
that Prometheus knows how to read; where a run stands is in gauges. Moments are timestamps, and
ages are
`time() - timestamp`, right even while nothing is updated.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from trainer.distributed.step_timing import PHASES
from trainer.metrics.spec import METRICS as QUALITY

Scope = Literal["run", "node", "rank"]
Kind = Literal["counter", "gauge"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        name: Without the prefix.
        kind: The Prometheus type.
        scope: `run`: the node of rank 0 reports it for all ranks. `node`: each node reports it,
            with counters added over its ranks. `rank`: one series a rank, with the label `rank`.
        help: One sentence with the unit.
        labels: Labels other than `run` and `rank`.
    """

    name: str
    kind: Kind
    scope: Scope
    help: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The name that Prometheus sees."""
        return PREFIX + self.name

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The labels of its series."""
        return ("run", *(("rank",) if self.scope == "rank" else ()), *self.labels)


PREFIX = "fullrank_"

# Of each table, of all ranks together and by rank.
_TABLES = {
    "table_rows{table}": "Rows of a table",
    "table_occupancy_ratio{table}": "Share of the rows that were ever updated, or that an id holds",
    "table_hit_ratio{table}": "Share of the evaluation's ids that met a row that was trained",
    "table_missing_ratio{table}": "Share of the latest training ids that were null, empty or out "
    "of vocabulary",
    "table_top_ratio{table}": "Share of the latest training ids on the ten most frequent rows",
    "table_row_norm_mean{table}": "Mean norm of a sample of the used rows",
    "table_row_norm_max{table}": "Largest norm of the same rows",
    "table_ids{table,outcome}": "Ids of a dynamic table since its process began, by what became of "
    "them; at the latest log interval or evaluation",
}
_DECLARED: tuple[tuple[Scope, Kind, dict[str, str]], ...] = (
    # Where the run stands.
    (
        "run",
        "gauge",
        {
            "run_info{recipe,dtype,dense_parallelism}": "Always 1; its labels say what runs",
            "step": "Finished steps of the run, those before a resume included",
            "steps_expected": "Steps after which the run ends",
            "start_timestamp_seconds": "When this process began to train, in seconds since 1970",
            "last_step_timestamp_seconds": "When the latest step ended, in seconds since 1970",
        },
    ),
    (
        "run",
        "counter",
        {
            "steps_total": "Steps that this process has finished",
            "rows_total": "Examples trained on all ranks since this process began",
            "steps_skipped_total": "Steps without an update because a gradient was not finite",
            "steps_nonfinite_total": "Steps whose loss was not finite",
        },
    ),
    # Where time goes.
    (
        "node",
        "counter",
        {
            "train_seconds_total": "Seconds of the node's ranks in training steps and between "
            "them, evaluations left out",
            "input_wait_seconds_total": "Of those, seconds in which the ranks waited for their "
            "loaders",
            "sampled_steps_total": "Steps of the node's ranks whose parts were timed, one a log "
            "interval",
            "sampled_phase_seconds_total{phase}": "Seconds of the sampled steps by part; together "
            f"the parts ({', '.join(PHASES)}) are the whole step",
        },
    ),
    (
        "run",
        "gauge",
        {
            "input_wait_ratio": "Share of the latest log interval that rank 0 waited for its "
            "loader",
            "rows_per_second": "Examples a second on all ranks in the latest log interval",
        },
    ),
    (
        "run",
        "counter",
        {
            "checkpoint_stall_seconds_total": "Seconds that training stood still for checkpoints",
        },
    ),
    # Quality while training.
    (
        "run",
        "gauge",
        {
            "loss": "Mean loss of the latest log interval",
            "auc": "AUC of rank 0's latest training examples, first label",
            "label_mean": "Mean label of the same examples",
            "prediction_mean": "Mean prediction of the same examples",
            "prediction_stddev": "Standard deviation of the same predictions",
            "calibration_ratio": "Mean prediction over mean label of the same examples; above 1 "
            "predicts too much",
            "learning_rate{part}": "Learning rate of the latest step, of the dense weights or of "
            "the tables (the largest)",
            "loss_scale": "Scale of the loss in FP16; 1 in other formats",
            "gradient_norm": "Norm of the unscaled gradient in the latest step of an interval, "
            "before clipping",
            "alert_active{alert}": "1 while an alert of the run is active, by its name in the log",
        },
    ),
    # The latest evaluation.
    (
        "run",
        "gauge",
        {
            "evaluation_timestamp_seconds": "When the latest evaluation ended, in seconds since "
            "1970",
            "evaluation_rows": "Examples of the latest evaluation",
            **{one.prometheus: f"{one.meaning}; on the test rows" for one in QUALITY.values()},
            "effective_rank{layer,module,path}": "Entropy effective rank at the latest "
            "evaluation, by place in the model",
            "effective_rank_ratio{layer,module,path}": "The same over the largest rank that is "
            "possible there",
        },
    ),
    # Tables, at the latest evaluation.
    (
        "run",
        "gauge",
        {
            "table_rows_used{table}": "Rows that were ever updated, or that an id holds",
            "table_bytes{table}": "Bytes of a table's weights on all ranks",
            **_TABLES,
        },
    ),
    # What a sampled step asks of tables and network, on all ranks.
    (
        "run",
        "gauge",
        {
            "step_features": "Features that a step looks up",
            "step_lookups": "Lookup kernels of a sampled step",
            "step_collectives": "Exchanges of ids and vectors of a sampled step",
            "step_ids{stage}": "Ids of a sampled step: in the batches, sent after deduplication, "
            "looked up",
            "step_sent_bytes": "Bytes of a sampled step that went to other ranks",
            "pipelined_modules": "Modules of tables that exchange ids ahead of time",
            "sharded_modules": "Modules of tables; all of them should be pipelined",
        },
    ),
    # Checkpoints.
    (
        "run",
        "gauge",
        {
            "checkpoint_timestamp_seconds": "When the newest complete checkpoint was written, in "
            "seconds since 1970",
            "checkpoint_step": "Step of the newest complete checkpoint",
            "checkpoint_interval_seconds": "The interval between checkpoints that is configured; "
            "0 for none by the clock",
        },
    ),
    ("run", "counter", {"checkpoint_failures_total": "Checkpoints that could not be written"}),
    # The ranks of a node.
    (
        "node",
        "gauge",
        {
            "ranks": "Ranks of this node that are alive",
            "ranks_expected": "Ranks that this node started with",
            "restarts": "How often the launcher has started the ranks again",
            "rank_skew_seconds": "Largest minus smallest rank_own_seconds of the node: what the "
            "others wait for the slowest",
        },
    ),
    (
        "rank",
        "gauge",
        {
            "rank_step": "Finished steps as this rank counts them",
            "rank_last_step_timestamp_seconds": "When this rank finished its latest step, in "
            "seconds since 1970",
            "rank_own_seconds": "What this rank took in its latest sampled step for input, copies "
            "and the dense forward, where it waits for no other",
            "rank_resident_memory_bytes": "Resident memory of the rank's process, without its "
            "loader's workers",
            "rank_device_memory_bytes": "Memory of the rank's accelerator that tensors hold; "
            "absent on a CPU",
            **{f"rank_{name}": f"{meaning}; of this rank" for name, meaning in _TABLES.items()},
        },
    ),
    (
        "rank",
        "counter",
        {
            "rank_input_wait_seconds_total": "Seconds in which this rank waited for its loader",
        },
    ),
)
METRICS = tuple(
    Metric(
        name.partition("{")[0], kind, scope, help, tuple(re.findall(r"\w+", name.partition("{")[2]))
    )
    for scope, kind, metrics in _DECLARED
    for name, help in metrics.items()
)
BY_NAME = {metric.name: metric for metric in METRICS}


def table(metrics: Iterable[Metric] = METRICS) -> str:
    """Return the metrics as a table in Markdown."""
    lines = ["| metric | kind | of | labels | meaning |", "|---|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(metric.all_labels)
        lines.append(
            f"| `{metric.full_name}` | {metric.kind} | {metric.scope} | {labels} | {metric.help} |"
        )
    return "\n".join(lines)


def document() -> str:
    """Return deploy/METRICS.md."""
    return f"""# Metrics

What the exporter of each node shows at `/metrics`. Generated:
`python -m trainer.telemetry.prometheus_metrics > deploy/METRICS.md`.

`of` says who tells: `run`, the node of rank 0 for all ranks; `node`, each node, counters added
over its ranks; `rank`, one series a rank. A rank that has died is gone from the `rank` series at
once, and what it had counted stays in its node's sums. Counters begin at 0 with each process;
where a run stands after a resume is in gauges. Training quality is that of rank 0's latest
examples, and of the test rows in `evaluation_*`. Parts of a step are those of one sampled step a
log interval (`--telemetry.interval-steps`): on a CPU by its clock, on an accelerator by events in
the stream that computes, so that nothing waits for a measurement. What overlaps with computing
costs no time and is in no part; the averaging of dense gradients is in `backward`, the exchange of
the tables' gradients in `update`.

{table()}

Nights write `night.prom` for node_exporter: `pipelines/nightly/night_metrics.py` lists it.
"""


def main(arguments: list[str] | None = None) -> None:
    """Print deploy/METRICS.md."""
    prog, about = "python -m trainer.telemetry.prometheus_metrics", "Print deploy/METRICS.md."
    argparse.ArgumentParser(prog, description=about).parse_args(arguments)
    sys.stdout.write(document())


if __name__ == "__main__":
    main()
