# SPDX-License-Identifier: MIT
"""Write the small run that later versions must load: python -m tests.data.write_run.

It replaces tests/data/run-format-N, where N is the number of this version's checkpoint format: a
generated log of two days, and a run of three steps on it with a checkpoint after the second and the
third. Run it when the format's number changes, and keep the folders of formats that are still read.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from models.baselines.fields.dlrm import DLRMConfig
from models.heads import HeadConfig
from pipelines.synthesize import SynthesisConfig, synthesize
from pipelines.synthetic.click_model import ClickConfig
from tests.support import runs
from trainer.checkpoint.layout import FORMAT
from trainer.config.config import TrainConfig
from trainer.runtime.exit_codes import exit_code
from trainer.runtime.runtime import start
from trainer.trainer import Trainer

FOLDER = Path(__file__).parent / f"run-format-{FORMAT}"


def configure() -> TrainConfig:
    """Return the configuration of the run, for a working folder that holds `logs`."""
    config = runs.small(
        "dlrm.demo",
        Path("logs"),
        *("--model.tokenizer.token-dim", "4", "--loader.batch-size", "16", "--max-steps", "3"),
        *("--checkpoint.interval-steps", "2", "--checkpoint.interval-seconds", "0"),
        *("--export.no-serve", "--telemetry.mode", "plain", "--runtime.device", "cpu"),
        rows=25,
    )
    tower, head = DLRMConfig(hidden_units=(4,)), HeadConfig(hidden_units=(4,))
    model = dataclasses.replace(config.model, tower=tower, head=head)
    return dataclasses.replace(config, model=model)


def train(output: Path) -> int:
    """Begin the run, or go on with it; return the exit code."""

    def work() -> None:
        config = configure()
        Trainer(config, output, start(config.runtime)).fit()

    return exit_code(work)


def main() -> int:
    """Write the folder."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    os.chdir(FOLDER)  # so that no path of this machine is kept
    clicks = ClickConfig(num_users=20, num_items=50)
    synthesize(Path("logs"), SynthesisConfig(days=2, rows_per_day=64, clicks=clicks))
    code = train(Path("run"))
    for lock in Path().rglob(".lock"):
        lock.unlink()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
