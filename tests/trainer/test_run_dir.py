# SPDX-License-Identifier: MIT
"""The folder of a run belongs to one process at a time, and says what is wrong with it."""

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import threading
import uuid

import fsspec
import pytest
import torch
import torch.distributed as dist

from pipelines.reporting import run_data
from tests.support import s3
from trainer.checkpoint import dcp
from trainer.checkpoint.ownership import OWNER, RUN, take
from trainer.checkpoint.storage import address, locate
from trainer.config.command_line import apply_overrides
from trainer.config.config import TrainConfig, to_dict
from trainer.recipes.load import load_recipe
from trainer.run_dir import CONFIG, RECIPE_CHANGES, checkpoints_of, claim, note_changes
from trainer.runtime.runtime import Runtime
from trainer.warm_start.policies import resolve

RECIPE = "dlrm.demo"
OTHER = f"""
import sys
from pathlib import Path
from trainer.config.command_line import apply_overrides
from trainer.recipes.load import load_recipe
from trainer.run_dir import _claim

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


@pytest.fixture(params=["disk", "memory", "s3"])
def shared(request, tmp_path, monkeypatch):
    """An empty folder for checkpoints, as a setting."""
    name = uuid.uuid4().hex[:8]
    if request.param == "disk":
        return str(tmp_path / "shared")
    if request.param == "memory":
        return f"memory://{name}"
    for key, value in request.getfixturevalue("server").items():
        monkeypatch.setenv(key, value)
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    if not files.exists("bucket"):
        files.mkdir("bucket")
    return f"{s3.BUCKET}/{name}"


@pytest.fixture(scope="module")
def server():
    with s3.serving() as environment:
        yield environment


def into(folder):
    config = load_recipe(RECIPE)
    return dataclasses.replace(
        config, checkpoint=dataclasses.replace(config.checkpoint, folder=str(folder))
    )


def test_of_two_fresh_runs_with_one_folder_for_checkpoints_the_second_is_refused(
    tmp_path, runtime, shared
):
    claim(tmp_path / "a", into(shared), runtime)
    with pytest.raises(ValueError, match=r"belongs to the run in .*/a; choose another, or remove"):
        claim(tmp_path / "b", into(shared), runtime)
    assert not (tmp_path / "b").exists()
    assert claim(tmp_path / "a", into(shared), runtime) is None, "the first goes on"
    (tmp_path / "a").rename(tmp_path / "moved")
    assert claim(tmp_path / "moved", into(shared), runtime) is None, "wherever it is moved to"
    if "://" in shared:  # whether checkpoints are left there, nobody looks
        with pytest.raises(ValueError, match=r"checkpoint.folder: '.*', now ''\); resume it with"):
            claim(tmp_path / "moved", into(""), runtime)
        return
    assert claim(tmp_path / "moved", into(""), runtime) is None
    assert claim(tmp_path / "b", into(shared), runtime) is None, "free since the first moved out"
    with pytest.raises(ValueError, match=r"belongs to the run in .*/b; choose another"):
        claim(tmp_path / "moved", into(shared), runtime)


def test_of_many_that_want_one_folder_at_once_one_gets_it(tmp_path, shared):
    wanted, refused = locate(shared), []
    wanted.mkdir(parents=True, exist_ok=True)
    together = threading.Barrier(4)

    def want(output) -> None:
        output.mkdir()
        together.wait()
        try:
            take(wanted, output)
        except ValueError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=want, args=(tmp_path / str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owner = json.loads((wanted / OWNER).read_text())["output"]
    assert len(refused) == 3 and all(f"belongs to the run in {owner}" in text for text in refused)


def test_a_run_that_died_while_it_took_a_folder_takes_it_in_the_next_attempt(tmp_path, runtime):
    output, shared = tmp_path / "run", tmp_path / "shared"
    output.mkdir()
    take(shared, output)  # and no config.json was written
    assert claim(output, into(shared), runtime) is None
    (output / RUN).unlink()
    assert claim(output, into(shared), runtime) is None, "known by where it is"
    (shared / OWNER).write_text("{")
    with pytest.raises(ValueError, match=r"belongs to the run in .unknown.; .* remove .*owner"):
        claim(output, into(shared), runtime)


def test_the_own_folder_of_another_run_is_refused(tmp_path, runtime):
    claim(tmp_path / "a", load_recipe(RECIPE), runtime)
    with pytest.raises(ValueError, match=r"checkpoints is that of the run in .*/a; choose another"):
        claim(tmp_path / "b", into(tmp_path / "a" / "checkpoints"), runtime)


def test_a_store_that_does_not_answer_is_named(tmp_path, runtime, monkeypatch):
    def fails(*_):
        raise LookupError("no credentials")

    monkeypatch.setattr(fsspec.filesystem("memory"), "exists", fails)
    monkeypatch.setattr(fsspec.filesystem("memory"), "isdir", fails)
    with pytest.raises(ValueError, match=r"memory://x cannot be used \(no credentials\); choose"):
        claim(tmp_path / "run", into("memory://x"), runtime)


@pytest.mark.parametrize("junk", [None, 3, "x", [], {}, [{}]])
def test_whatever_stands_in_a_configuration_is_named_and_breaks_nothing(tmp_path, runtime, junk):
    output, config = tmp_path / "run", load_recipe(RECIPE)
    claim(output, config, runtime)
    whole = json.loads((output / CONFIG).read_text())
    for key in whole:
        (output / CONFIG).write_text(json.dumps({**whole, key: junk}))
        if key in ("schema", "model", "data", "dense", "loader"):
            with pytest.raises(ValueError, match="run: holds an unfinished run of another config"):
                claim(output, config, runtime)
        else:
            with contextlib.suppress(ValueError):
                claim(output, config, runtime)
    (output / CONFIG).write_text(json.dumps(junk))
    if not isinstance(junk, dict):
        with pytest.raises(ValueError, match=r"config\.json: damaged .expected an object.*back"):
            claim(output, config, runtime)


def with_folder(folder: str) -> TrainConfig:
    config = load_recipe(RECIPE)
    checkpoint = dataclasses.replace(config.checkpoint, folder=folder)
    return dataclasses.replace(config, checkpoint=checkpoint)


def test_a_relative_folder_of_checkpoints_is_the_same_from_everywhere(
    tmp_path, runtime, monkeypatch
):
    config = with_folder("kept/checkpoints")
    output = tmp_path / "run"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    assert claim(output, config, runtime) is None
    folder = checkpoints_of(output, config)
    assert folder == output / "kept/checkpoints"
    step = dcp.save({"w": torch.ones(2)}, folder, 4, {})
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert claim(output, config, runtime) == step
    assert resolve(output) == step, "what reads the run finds it too"
    moved = output.rename(tmp_path / "moved")
    assert resolve(moved) == moved / "kept/checkpoints/step-4", "and after the run has moved"
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    "named",
    [
        *("memory://other/x", "s3://bucket/x", "filecache::s3://bucket/x", "http://127.0.0.1:1/x"),
        *("file:///etc", "github://me:it@/x", "simplecache::memory://x"),
    ],
)
def test_an_address_that_only_a_folder_names_is_not_opened(tmp_path, runtime, monkeypatch, named):
    opened = []
    monkeypatch.setattr("fsspec.filesystem", lambda *names, **_: opened.append(names))
    run = tmp_path / "run"
    run.mkdir()
    values = to_dict(with_folder(""))
    values["checkpoint"]["folder"] = named
    (run / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="an address is not contacted because a folder names it"):
        resolve(run)
    with pytest.raises(ValueError, match=re.escape("checkpoint.folder: '")):
        claim(run, with_folder(""), runtime)
    assert opened == []


@pytest.mark.parametrize(
    "folder", ["memory://me:s3cret@bucket/x", "memory://bucket/x?token=s3cret"]
)
def test_a_password_in_the_folder_of_checkpoints_is_used_and_kept_nowhere(
    tmp_path, runtime, folder
):
    config = with_folder(folder)
    assert claim(tmp_path / "run", config, runtime) is None
    assert address(checkpoints_of(tmp_path / "run", config)) == folder
    path = dcp.save({"w": torch.ones(2)}, checkpoints_of(tmp_path / "run", config), 4, {})
    found = claim(tmp_path / "run", config, runtime)
    assert found == path and found is not None and "s3cret" in address(found)
    shown = f"{found} {found!r} {to_dict(config)}"
    shown += "".join(item.read_text() for item in (tmp_path / "run").iterdir() if item.is_file())
    with pytest.raises(dcp.RunError) as failure:
        dcp.save({"w": "no tensor"}, found.parent, 5, {})
    assert "s3cret" not in shown + str(failure.value)


def test_a_run_notes_how_it_differs_from_its_recipe(tmp_path):
    recipe = load_recipe(RECIPE)
    config = apply_overrides(recipe, ["--dense.learning-rate", "0.25"])
    note_changes(tmp_path, recipe, config)
    assert run_data.CHANGES == RECIPE_CHANGES
    found = run_data.read_data(tmp_path / RECIPE_CHANGES)
    assert found["recipe"] == RECIPE
    (one,) = found["settings"]
    assert one["setting"] == "dense.learning_rate" and one["run"] == 0.25
    assert one["recipe"] == recipe.dense.learning_rate
