# SPDX-License-Identifier: MIT
"""The folder of a run belongs to one process at a time, and says what is wrong with it."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from trainer.config import load_recipe
from trainer.run_folder import CONFIG, claim
from trainer.runtime import Runtime

RECIPE = "dlrm.demo"
OTHER = f"""
import sys
from pathlib import Path
from trainer.config import load_recipe
from trainer.run_folder import _claim

_claim(Path(sys.argv[1]), load_recipe({RECIPE!r}))
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def runtime():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cpu")
    yield Runtime(rank=0, local_rank=0, world_size=1, local_world_size=1, device=device, seed=0)
    dist.destroy_process_group()


def test_a_folder_in_which_another_process_trains_is_refused_until_that_ends(tmp_path, runtime):
    output, config = tmp_path / "run", load_recipe(RECIPE)
    command = [sys.executable, "-c", OTHER, str(output)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(ValueError, match=r"run: another process trains in this folder"):
            claim(output, config, runtime)
        other.kill()
    assert claim(output, config, runtime) is None
    assert claim(output, config, runtime) is None, "one process may come back to its own folder"


def test_a_folder_that_cannot_be_used_is_named_with_a_way_out(tmp_path, runtime):
    config = load_recipe(RECIPE)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file: expected a folder .*choose another --output"):
        claim(tmp_path / "file", config, runtime)
    with pytest.raises(ValueError, match=r"below: cannot be used .*choose another --output"):
        claim(tmp_path / "file" / "below", config, runtime)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CONFIG).write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json: damaged .*choose another --output"):
        claim(tmp_path / "run", config, runtime)


def test_what_a_process_that_died_left_is_cleaned_up_by_the_next_one(tmp_path, runtime):
    output, config = tmp_path / "run", load_recipe(RECIPE)
    claim(output, config, runtime)
    for name in ("step-3", ".step-4.replaced", ".step-5.incomplete", ".step-2.removed"):
        (output / "checkpoints" / name).mkdir(parents=True)
    for name in ("step-3", ".step-4.replaced"):
        (output / "checkpoints" / name / "manifest.json").write_text("{}")
    assert claim(output, config, runtime) == output / "checkpoints" / "step-4"
    assert sorted(p.name for p in (output / "checkpoints").iterdir()) == ["step-3", "step-4"]


def test_a_run_of_a_version_without_a_setting_is_resumed_with_the_settings_default(
    tmp_path, runtime
):
    output, config = tmp_path / "run", load_recipe(RECIPE)
    claim(output, config, runtime)
    values = json.loads((output / CONFIG).read_text())
    del values["data"]["allow_overlap"]
    (output / CONFIG).write_text(json.dumps(values))
    assert claim(output, config, runtime) is None
    (output / CONFIG).write_text(json.dumps({**values, "epochs": 7, "colour": "red"}))
    with pytest.raises(ValueError, match=r"colour: 'red', now None; .*epochs: 7, now 1"):
        claim(output, config, runtime)


def test_a_run_never_takes_over_the_checkpoints_of_another(tmp_path, runtime):
    output, config = tmp_path / "run", load_recipe(RECIPE)

    def within(folder, **more):
        moved = dataclasses.replace(config.checkpoint, folder=str(folder), **more)
        return dataclasses.replace(config, checkpoint=moved)

    claim(output, config, runtime)
    assert claim(output, within("", keep=5), runtime) is None
    assert claim(output, within(tmp_path / "empty"), runtime) is None, "none has been written yet"
    for now, holder in ((tmp_path / "other", "other"), ("", "empty")):
        step = tmp_path / holder / "step-4"
        step.mkdir(parents=True)
        (step / "manifest.json").write_text("{}")
        with pytest.raises(
            ValueError, match=f"checkpoint.folder: .* with checkpoints in '.*{holder}'"
        ):
            claim(output, within(now), runtime)
