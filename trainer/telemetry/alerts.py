# SPDX-License-Identifier: MIT
"""Alerts: failures that a falling loss can hide, named loudly, with likely causes and a way out.

A ranking model that predicts the base rate for everyone has a respectable log loss and an AUC of
0.5, and a trainer that waits for its loader still prints progress. Both are found here, from one
point of the training curve at a time. So are examples that all have weight 0: nothing is learnt
from them, and their loss is 0.

Shapes: B examples per rank, K labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embeddings.schema.schema import Label
from trainer.metrics import validity
from trainer.telemetry import leaks

# Predictions that spread less than this share of the labels' standard deviation are one value.
_SPREAD = 1e-3
_AUC_BAND = 0.01
# Odds so many times off, with every prediction on the same side of the labels' mean.
_ODDS = 3.0
_INPUT_WAIT = 0.5
# Steps that a loss scale may take to find its place without a word.
_SKIPPED = 3
# Rows of one value of a label that are no chance: at 0.1 % clicks, one log in 22,000 has none.
_CONSTANT_ROWS = 10_000
# Of the ids that were to get a row in an interval; of all occurrences of ids in it.
_FAILED, _PUSHED_OUT = 0.01, 0.1

ADVICE = {
    **validity.ADVICE,
    "feature_is_label": leaks.ADVICE,
    "constant_label": (
        "The model learns to predict that value for everyone. Likely causes: the join of the "
        "clicks had not run; a label column of another meaning. Way out: look at the label means "
        "of the training days; ingest them again."
    ),
    "nonfinite_loss": (
        "Likely causes: a learning rate that is too high; a dense feature with huge values; fp16 "
        "without loss scaling. Way out: resume from the last checkpoint with half the learning "
        "rate; train in fp32 or bf16 to tell overflow from divergence."
    ),
    "no_update": (
        "The model is as it began. Likely causes: fp16 with a loss scale that is far too high, or "
        "gradients that are not finite at any scale. Way out: lower precision.initial_scale; train "
        "in fp32 or bf16 to tell overflow from divergence."
    ),
    "constant_predictions": (
        "Likely causes: a collapsed tower (learning rate too high, no normalisation); tables that "
        "are not updated; constant features. Way out: lower the dense learning rate or add warm-up "
        "steps; look at the effective ranks in the report; check that the tables move."
    ),
    "one_sided_predictions": (
        "Likely causes: logits saturated by a learning rate that is too high; a label rate that "
        "jumped. Way out: lower the learning rate; start the head's bias at the base rate; compare "
        "the days' label means."
    ),
    "auc_stuck": (
        "Nothing is being learnt about order. Likely causes: features that do not reach the model "
        "(a wrong column, every id out of vocabulary); labels of other rows; a learning "
        "rate near 0. Way out: check the ingestion statistics, then train on 1,000 rows until they "
        "are memorised."
    ),
    "no_weight": (
        "Nothing is learnt from them. Likely causes: a weight column that is 0 or not filled in; a "
        "label that is null. Way out: look at the ingestion statistics of the days; remove the "
        "label, or its weight, from the schema."
    ),
    "failed_inserts": (
        "Likely causes: more different ids in one batch than the table has rows; eviction 'none' "
        "and a full table. Way out: raise its num_embeddings to a fifth more than the ids that are "
        "to stay; let ids go (dynamic.eviction); admit fewer (min_occurrences, probability)."
    ),
    "crowded_table": (
        "Vectors leave before they have learnt. Likely cause: far fewer rows than ids that come "
        "back. Way out: raise its num_embeddings; admit fewer ids (min_occurrences, probability)."
    ),
    "input_bound": (
        "Likely causes: too few loader workers; slow storage; one large row group. Way out: raise "
        "the loader's workers and prefetch, or read from local disk."
    ),
}


class Alerts:
    """Watches the training curve.

    Args:
        after_steps: Warm-up steps without alerts. A loss that is not finite raises one at once.
        intervals: Consecutive points that make a stuck AUC or a slow input.

    Attributes:
        active: Names of the alerts of the latest point.
        doubtful: Names of the doubts about the latest evaluation.
        first_steps: The step at which each name first occurred.
    """

    def __init__(self, after_steps: int, intervals: int) -> None:
        self.after_steps = after_steps
        self.intervals = intervals
        self.active: set[str] = set()
        self.doubtful: set[str] = set()
        self.first_steps: dict[str, int] = {}
        self._stuck = 0
        self._starved = 0

    def check(self, record: Mapping[str, float]) -> dict[str, str]:
        """Take a point of the curve; return name -> message of the alerts that begin with it."""
        found: dict[str, str] = {}
        if not math.isfinite(record["loss"]):
            found["nonfinite_loss"] = "no step of this interval had a finite loss"
        if record.get("skipped", 0) >= max(record["step"], _SKIPPED):
            found["no_update"] = f"all {int(record['step']):,} steps so far were skipped"
        if record["step"] > self.after_steps:
            found |= constant_predictions(record) or one_sided_predictions(record)
            found |= self._lasting(record)
        new = {
            name: f"{message}. {ADVICE[name]}"
            for name, message in found.items()
            if name not in self.active
        }
        self.active = set(found)
        for name in new:
            self.first_steps.setdefault(name, int(record["step"]))
        return new

    def evaluated(self, step: int, found: Mapping[str, str]) -> dict[str, str]:
        """Take the doubts about an evaluation; return name -> message of those that are new.

        Args:
            step: Finished steps.
            found: As `trainer.metrics.validity.all_doubts` returns them.
        """
        new = {
            name: f"{text}. {ADVICE[name]}"
            for name, text in found.items()
            if name not in self.doubtful
        }
        self.doubtful = set(found)
        for name in new:
            self.first_steps.setdefault(name, step)
        return new

    def state_dict(self) -> dict[str, Any]:
        """Return what is active and what may become active soon, as plain data."""
        return {
            "active": sorted(self.active),
            "doubtful": sorted(self.doubtful),
            "first_steps": self.first_steps,
            "stuck": self._stuck,
            "starved": self._starved,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.active, self.first_steps = set(state["active"]), dict(state["first_steps"])
        self.doubtful = set(state["doubtful"])
        self._stuck, self._starved = state["stuck"], state["starved"]

    def _lasting(self, record: Mapping[str, float]) -> dict[str, str]:
        """Return what is wrong only if it lasts."""
        auc, wait = record["auc"], record["input_wait"]
        self._stuck = self._stuck + 1 if abs(auc - 0.5) <= _AUC_BAND else 0
        self._starved = self._starved + 1 if wait > _INPUT_WAIT else 0
        found: dict[str, str] = {}
        if self._stuck >= self.intervals:
            found["auc_stuck"] = (
                f"the running AUC ({auc:.4f}) has been within {_AUC_BAND} of 0.5 for "
                f"{self._stuck} intervals"
            )
        if self._starved >= self.intervals:
            found["input_bound"] = (
                f"{wait:.0%} of the time is spent waiting for input, for {self._starved} intervals"
            )
        return found


def constant_predictions(record: Mapping[str, float]) -> dict[str, str]:
    """Return an alert if the predictions are all but one value."""
    mean, label_mean = record["prediction_mean"], record["label_mean"]
    spread = record["prediction_std"]
    scale = math.sqrt(label_mean * (1 - label_mean)) if 0 < label_mean < 1 else 1.0
    if not spread < _SPREAD * scale:
        return {}
    return {
        "constant_predictions": f"every example gets the same prediction, {mean:.6g} (standard "
        f"deviation {spread:.2g}; the labels' mean is {label_mean:.6g})"
    }


def one_sided_predictions(record: Mapping[str, float]) -> dict[str, str]:
    """Return an alert if all predictions lie on one side of the labels' mean, and far from it."""
    mean, label_mean = record["prediction_mean"], record["label_mean"]
    least, most = record["prediction_min"], record["prediction_max"]
    if not 0 < label_mean < 1 or not (least > label_mean or most < label_mean):
        return {}
    if 0 < mean < 1 and abs(_logit(mean) - _logit(label_mean)) < math.log(_ODDS):
        return {}
    side = "above" if least > label_mean else "below"
    return {
        "one_sided_predictions": f"every prediction is {side} the labels' mean, {label_mean:.6g} "
        f"(predictions: mean {mean:.6g}, from {least:.6g} to {most:.6g})"
    }


def full_tables(table: str, counts: Mapping[str, int]) -> dict[str, str]:
    """Return alerts of a dynamic table that cannot hold its ids.

    Args:
        table: The table's name.
        counts: Counts of an interval on all ranks, by their names in `embeddings/dynamic/idmap.py`.
    """
    found = {}
    failed, wanted = counts["failed"], counts["failed"] + counts["admitted"]
    if failed > _FAILED * wanted:
        found["failed_inserts"] = (
            f"table {table!r}: {failed:,} of {wanted:,} ids that were to get a row found none, and "
            "read one that they share"
        )
    pushed, seen = counts["evicted"], counts["ids"] - counts["missing"]
    if pushed > _PUSHED_OUT * seen:
        found["crowded_table"] = (
            f"table {table!r}: with {pushed:,} of {seen:,} occurrences a new id pushed another out"
        )
    return found


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


class LabelWeights:
    """Watches over all ranks that examples count, and that a label has both values.

    Args:
        labels: K, of the schema.
        group: All ranks.
    """

    def __init__(self, labels: Sequence[Label], group: dist.ProcessGroup) -> None:
        self.labels = tuple(labels)
        self.first_steps: dict[str, int] = {}
        self._group = group
        self._active: set[str] = set()
        self._constant: set[str] = set()
        self._local: Tensor | None = None
        self._resumed = False
        self.begin_epoch(0)

    @property
    def active(self) -> set[str]:
        """The names of the alerts: of the latest interval, and of the epoch so far."""
        names = (("no_weight", self._active), ("constant_label", self._constant))
        return {name for name, labels in names if labels}

    def begin_epoch(self, step: int) -> None:
        """Begin an epoch after `step` finished steps, or go on in the one that was resumed."""
        if self._resumed:
            self._resumed = False
            return
        self._epoch_start = self._interval_start = step
        self._epoch = torch.zeros(3, len(self.labels), dtype=torch.float64)

    def add(self, weights: Tensor, labels: Tensor) -> None:
        """Add a step's weights and labels, (B, K) each, without waiting for the device."""
        weights, labels = weights.detach(), labels.detach()
        # (3, K): weight, weight of the label's ones, rows that count.
        sums = [weights, weights * labels, weights > 0]
        local = torch.stack([one.sum(0, dtype=torch.float64) for one in sums])
        self._local = local if self._local is None else self._local + local

    def interval(self, step: int, last: bool = False) -> list[str]:
        """End an interval with `step`; return the alerts that begin with it. Collective.

        Raises nothing: a label that is absent for some hours may come back.

        Args:
            step: Finished steps.
            last: Whether the epoch ends with it, so that few rows are all there are.
        """
        if self._local is None:
            return []
        total, self._local = self._local, None
        dist.all_reduce(total, group=self._group)
        total = total.cpu()
        self._epoch += total
        found = zip(self.labels, total[0].tolist(), strict=True)
        empty = [label for label, sum_ in found if not sum_]
        new = [label for label in empty if label.name not in self._active]
        self._active = {label.name for label in empty}
        first, self._interval_start = self._interval_start + 1, step
        if new:
            self.first_steps.setdefault("no_weight", step)
        return [
            f"ALERT no_weight at step {step:,}: {_without_weight(label, first, step)}. "
            f"{ADVICE['no_weight']}"
            for label in new
        ] + self._constant_labels(step, last)

    def _constant_labels(self, step: int, last: bool) -> list[str]:
        """Return the alerts on labels that have had one value since the epoch began."""
        constant: dict[str, str] = {}
        for label, (weight, ones, rows) in zip(self.labels, self._epoch.T.tolist(), strict=True):
            if weight and ones in (0.0, weight) and (rows >= _CONSTANT_ROWS or last):
                constant[label.name] = (
                    f"label {label.name!r} is {ones / weight:.0f} in all {rows:,.0f} rows of steps "
                    f"{self._epoch_start + 1:,} to {step:,}"
                )
        new = [text for name, text in constant.items() if name not in self._constant]
        self._constant = set(constant)
        if new:
            self.first_steps.setdefault("constant_label", step)
        advice = ADVICE["constant_label"]
        return [f"ALERT constant_label at step {step:,}: {text}. {advice}" for text in new]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch so far as plain data, the same on all ranks. Collective."""
        total = torch.zeros_like(self._epoch) if self._local is None else self._local.clone()
        dist.all_reduce(total, group=self._group)
        return {
            "epoch_start": self._epoch_start,
            "interval_start": self._interval_start,
            "epoch": (self._epoch + total.cpu()).tolist(),
            "active": sorted(self._active),
            "constant": sorted(self._constant),
            "first_steps": self.first_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the epoch of `state_dict`."""
        self._epoch_start, self._interval_start = state["epoch_start"], state["interval_start"]
        self._epoch = torch.tensor(state["epoch"], dtype=torch.float64)
        self._active, self.first_steps = set(state["active"]), dict(state["first_steps"])
        self._constant = set(state["constant"])
        self._resumed = True

    def check_epoch(self, step: int) -> None:
        """End an epoch with `step`, after `interval`.

        Raises:
            ValueError: no example had any weight, so that nothing was learnt.
        """
        if step > self._epoch_start and not self._epoch[0].any():
            parts = [_without_weight(label, self._epoch_start + 1, step) for label in self.labels]
            raise ValueError(f"{'; '.join(parts)}. {ADVICE['no_weight']}")


def _without_weight(label: Label, first: int, last: int) -> str:
    """Say that all examples have weight 0 for `label`, and by which column."""
    if label.weight:
        cause = f"its weight column {label.weight!r} is 0, or its column {label.column!r} null"
    else:
        cause = f"its column {label.column!r} is null"
    return (
        f"label {label.name!r}: every example of steps {first:,} to {last:,} has weight 0: {cause}"
    )
