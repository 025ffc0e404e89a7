# SPDX-License-Identifier: MIT
"""How far an evaluation can be trusted: intervals, reliability, GAUC by the users' activity.

Shapes: U users.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainer.metrics.bootstrap import Bootstrap
from trainer.metrics.calibration import reliability
from trainer.metrics.gauc import UserAreas
from trainer.metrics.metrics import Metrics, communication_device
from trainer.metrics.spec import METRICS, with_intervals


class Details:
    """What is found of every label beside its metrics.

    `values` holds the first label's intervals, reliability and users by activity; of several
    labels each stands below `labels` as well.

    Args:
        replicates: Of the bootstrap.
    """

    def __init__(self, replicates: int = 100) -> None:
        self.values: dict[str, Any] = {}
        self._replicates = replicates
        self._bootstraps: dict[str, Bootstrap] = {}

    def begin(self, metrics: Metrics) -> None:
        """Begin an evaluation whose batches `metrics` sees as well."""
        self._metrics = metrics
        self._bootstraps = {
            name: Bootstrap(metrics, (number,), self._replicates)
            for number, name in enumerate(metrics.label_names)
        }

    def update(
        self,
        predictions: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        groups: torch.Tensor,
    ) -> None:
        """Add a batch, as `Metrics.update`. Collective once a label."""
        for bootstrap in self._bootstraps.values():
            bootstrap.update(predictions, labels, weights, groups)

    def finish(self, exact: Mapping[str, float]) -> None:
        """Find `values`, the same on all ranks. Collective.

        Args:
            exact: What the metrics have found of the same rows.
        """
        several = len(self._bootstraps) > 1
        found = {}
        for name, bootstrap in self._bootstraps.items():
            prefix = f"{name}_" if several else ""
            keys = (*METRICS, "gauc_users")
            own = {key: exact.get(f"{prefix}{key}", np.nan) for key in keys}
            bootstrap.finish([own])
            found[name] = self._of_label(bootstrap)
        self.values = dict(next(iter(found.values()))) | ({"labels": found} if several else {})

    def _of_label(self, bootstrap: Bootstrap) -> dict[str, Any]:
        intervals = {name: bootstrap.interval(name)[1] for name in with_intervals()}
        known = {name: ends for name, ends in intervals.items() if np.isfinite(ends[0])}
        histogram, predicted = bootstrap.histogram[0], bootstrap.predicted[0]
        found: dict[str, Any] = {
            "intervals": known,
            "reliability": reliability(bootstrap.edges[0], histogram, predicted),
        }
        if bootstrap.users:
            found["user_activity"] = activity(bootstrap.users[0], self._metrics.process_group)
        return found


def activity(users: UserAreas, group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """Return GAUC by how many rows a user has, in ranges that double. Collective.

    Args:
        users: Of this rank.
        group: All ranks.
    """
    # (U,) k, where 2^(k-1) < rows <= 2^k.
    level = np.ceil(np.log2(np.maximum(users.rows, 1))).astype(np.int64)
    both = np.isfinite(users.auc)
    weight = np.where(both, users.weight, 0)
    columns = (np.ones(len(level)), both, users.rows, weight, weight * np.where(both, users.auc, 0))
    # (64, 5) sums by level: users, users with both classes, rows, w, w AUC.
    sums = np.stack([np.bincount(level, one, 64) for one in columns], 1, dtype=np.float64)
    device = communication_device(group)
    if device is not None:
        total = torch.from_numpy(sums).to(device)
        dist.all_reduce(total, group=group)
        sums = total.cpu().numpy()
    found = []
    for number, (count, with_both, rows, mass, areas) in enumerate(sums.tolist()):
        if count:
            record = {
                "from_rows": 2 ** (number - 1) + 1 if number else 1,
                "to_rows": 2**number,
                "users": count,
                "users_with_both": with_both,
                "rows": rows,
                "gauc": areas / mass if mass else np.nan,
            }
            found.append(record)
    return found
