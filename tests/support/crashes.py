# SPDX-License-Identifier: MIT
"""Epochs that crash and go on: which rows are trained in the end, over any sequence of runs."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from tests.support.logs import loaders, rows_of
from trainer.data.files import LogFile
from trainer.data.loader import LoaderConfig

ORDERS = ["shuffle", "time", "none"]
# Rows of each row group of each file.
LAYOUTS = st.lists(st.lists(st.integers(0, 17), max_size=4), min_size=1, max_size=5).filter(
    lambda layout: sum(map(sum, layout))
)


class Run(NamedTuple):
    """A run that trains `kept` steps until its last checkpoint and takes `lost` more batches."""

    world_size: int
    num_workers: int
    batch_size: int
    shuffle_rows: int
    kept: int
    lost: int


def runs(max_workers: int = 0, max_world_size: int = 4) -> st.SearchStrategy[Run]:
    """Draw runs of up to so many loader workers on each of up to so many ranks."""
    return st.builds(
        Run,
        st.integers(1, max_world_size),
        st.integers(0, max_workers),
        st.integers(1, 5),
        st.integers(0, 20),
        st.integers(0, 5),
        st.integers(0, 3),
    )


def rows_over_crashes(files: Sequence[LogFile], crashes: Sequence[Run], order: str) -> list[int]:
    """Let runs crash one after the other, and a last one finish; return the rows that were trained.

    A step counts if a checkpoint has it: others are trained again.
    """
    state, rows = None, []
    for run in [*crashes, Run(2, crashes[-1].num_workers, 3, 10, 10**9, 0)]:
        config = LoaderConfig(
            batch_size=run.batch_size,
            shuffle_rows=run.shuffle_rows,
            order=order,
            num_workers=run.num_workers,
        )
        states = []
        for loader in loaders(files, config, run.world_size):
            if state is not None:
                loader.load_state_dict(state)
            first, taken = loader.step, []
            if loader.step < len(loader):
                for batch in loader:
                    taken.append(batch)
                    if len(taken) == run.kept + run.lost:
                        break
            kept = min(run.kept, len(taken))
            rows += rows_of(taken[:kept])
            states.append(loader.state_dict(first + kept))
            loader.close()
        assert all(other == states[0] for other in states), "ranks agree on the position"
        state = pickle.loads(pickle.dumps(states[0]))
    return rows
