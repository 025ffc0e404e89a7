# SPDX-License-Identifier: MIT
"""How many modules a batch and a checkpoint pass, as trainer/README.md says.

A module counts if one of its functions runs in the step or the save that is observed.
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs
from trainer.config.config import TrainConfig
from trainer.runtime.runtime import Runtime
from trainer.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "trainer/README.md").read_text("utf-8")
OURS = ("embeddings", "models", "trainer")


class Modules:
    """Collects the modules of ours whose functions run; in a function called `stop`, no more."""

    def __init__(self, stop: str = "") -> None:
        self.found: set[str] = set()
        self._stop = stop

    def note(self, frame: Any, event: str, _: Any) -> None:
        """Take note of a call."""
        if event != "call":
            return
        if self._stop and frame.f_code.co_qualname == self._stop:
            sys.setprofile(None)
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in OURS:
            self.found.add(str(path.relative_to(ROOT)))


def observed(work: Callable[[], Any], stop: str = "") -> set[str]:
    """Return the modules that `work` runs through, in threads that it starts too."""
    modules = Modules(stop)
    threading.setprofile(modules.note)
    sys.setprofile(modules.note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return modules.found


def paths(runtime: Runtime, config: TrainConfig, output: Path) -> tuple[list[str], list[str]]:
    """Return the modules of a second step, up to its loss, and those of a save after it."""
    trainer = Trainer(config, output, runtime)
    trainer.parallel.module.train()
    batches = itertools.chain(iter(trainer.train_loader))
    trainer.pipeline.progress(batches)
    step = observed(lambda: trainer.pipeline.progress(batches), "Precision.backward")
    tensors, manifest = trainer.state.tensors(), trainer.state.manifest()
    trainer.saver.prepare(tensors)  # as a run does before its first step

    def save() -> None:
        trainer.saver.save(tensors, 2, manifest)
        trainer.saver.wait(last=True)

    saved = observed(save)
    trainer.train_loader.close()
    trainer.test_loader.close()
    return sorted(step), sorted(saved)


@pytest.mark.dist
def test_the_readme_counts_the_modules_that_a_batch_and_a_checkpoint_pass(processes, tmp_path):
    logs = runs.generate(tmp_path / "logs")
    config = runs.small("dlrm.demo", logs, "--loader.shuffle-rows", "64")
    (found,) = processes.run(paths, config, tmp_path / "run", world_size=1)
    (claimed,) = re.findall(r"passes (\d+) modules .*? a checkpoint (\d+)", README, re.DOTALL)
    passed = [f"{len(modules)}: {' '.join(modules)}" for modules in found]
    assert [len(modules) for modules in found] == list(map(int, claimed)), "\n".join(passed)
