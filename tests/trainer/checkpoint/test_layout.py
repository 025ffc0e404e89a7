# SPDX-License-Identifier: MIT
"""There is a complete checkpoint at every moment, and a folder that is none says what it is."""

import json
import math
import shutil
from pathlib import Path

import pytest

from trainer.checkpoint import layout
from trainer.checkpoint.layout import MANIFEST, RUN, commit, complete, draft, read_manifest, recover
from trainer.checkpoint.retention import prune

SAVED = {"format": layout.FORMAT, "step": 1, "world_size": 1, "files": {}}
WHOLE = {
    **{"rows": 1, "epoch": 0, "position": None, "train_seconds": 1.0, "wait_seconds": 0.0},
    **{"padded_rows": 0, "out_of_range": {}},
    **{"precision": {}, "ranks": [], "config": {}, "families": {}, "telemetry": {}, "weights": {}},
    "dynamic_tables": {},
    **{f"{name}_fingerprint": "0" for name in ("schema", "config", "routing")},
    **SAVED,
}


def write(folder: Path, step: int, name: str = "", **more) -> Path:
    """Write a checkpoint of two files; `name` is that of a folder in which one is in the making."""
    path = folder / (name or f"step-{step}")
    path.mkdir(parents=True)
    (path / "shard").write_text("numbers")
    (path / MANIFEST).write_text(json.dumps({**SAVED, "step": step, **more}))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Crash(Exception):
    """The process died."""


def die_at(monkeypatch, moment: int) -> None:
    """Let the `moment`-th rename or removal of a file or folder not happen, nor anything after."""
    done = 0

    def counted(function):
        def call(*arguments, **options):
            nonlocal done
            done += 1
            if done >= moment:
                raise Crash
            return function(*arguments, **options)

        return call

    def one_by_one(path):
        for item in sorted(path.iterdir()):
            item.unlink()
        path.rmdir()

    monkeypatch.setattr(Path, "rename", counted(Path.rename))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    monkeypatch.setattr(layout.shutil, "rmtree", one_by_one)


@pytest.mark.parametrize("again", [False, True], ids=["the next step", "the same step again"])
@pytest.mark.parametrize("leftover", [False, True], ids=["clean", "after an earlier crash"])
def test_a_crash_at_any_moment_leaves_a_complete_checkpoint(tmp_path, monkeypatch, again, leftover):
    moments = 0
    for moment in range(1, 20):
        folder = tmp_path / str(moment)
        write(folder, 3)
        if leftover:
            # The process died between the two renames of a replacement.
            write(folder, 3, ".step-3.replaced")
            shutil.rmtree(folder / "step-3")
        step = 3 if again else 4
        temporary = write(folder, step, f".step-{step}.incomplete")
        with monkeypatch.context() as patch:
            die_at(patch, moment)
            try:
                commit(temporary, folder / f"step-{step}", {**SAVED, "step": step})
                prune(folder, 1)
            except Crash:
                moments += 1
        last = complete(folder)[-1]
        assert read_manifest(last)["step"] in (3, step)
        assert sorted(path.name for path in last.iterdir()) == [MANIFEST, "shard"]
        recover(folder)
        assert set(names(folder)) <= {"step-3", f"step-{step}"}
        prune(folder, 1)
        assert len(complete(folder)) == 1
    assert 3 <= moments < 19, "expected to have died in every place, and to have got through once"


def test_recovery_removes_what_is_unfinished_and_nothing_else(tmp_path):
    write(tmp_path, 5)
    write(tmp_path, 7, ".step-7.replaced")
    for name in (".step-6.incomplete", ".step-4.removed", "step-notes", ".keep"):
        (tmp_path / name).mkdir()
    assert [path.name for path in complete(tmp_path)] == ["step-5", ".step-7.replaced"]
    recover(tmp_path)
    assert names(tmp_path) == [".keep", "step-5", "step-7", "step-notes"]
    recover(tmp_path / "nowhere")


def test_pruning_keeps_the_newest_by_number_not_by_name(tmp_path):
    for step in (9, 10, 100):
        write(tmp_path, step)
    prune(tmp_path, 2)
    assert names(tmp_path) == ["step-10", "step-100"]


@pytest.mark.parametrize("key", sorted(RUN))
def test_a_manifest_that_lacks_a_key_is_named_with_the_key(tmp_path, key):
    path = write(tmp_path, **WHOLE)
    assert read_manifest(path, RUN)["rows"] == 1
    for values in ({k: v for k, v in WHOLE.items() if k != key}, {**WHOLE, key: True}):
        (path / MANIFEST).write_text(json.dumps(values))
        with pytest.raises(ValueError, match=rf"manifest\.json: damaged \(key '{key}': expected"):
            read_manifest(path, RUN)


@pytest.mark.parametrize("content", ["{}", "[]", "null", "{", "\x80"])
def test_a_manifest_that_is_none_is_one_line(tmp_path, content):
    path = write(tmp_path, 1)
    (path / MANIFEST).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"manifest\.json: damaged .*older checkpoint") as caught:
        read_manifest(path)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_checkpoint_says_what_is_there_and_where_one_is(tmp_path):
    run = tmp_path / "run"
    write(run / "checkpoints", 3)
    file = tmp_path / "file"
    file.touch()
    for folder in ("logs", "empty", "unfinished", "logs/dt=2026-01-01"):
        (tmp_path / folder).mkdir()
    (tmp_path / "unfinished" / "config.json").touch()
    for path, found in (
        (run, r"got neither; did you mean .*step-3\?"),
        (run / "checkpoints" / "step-4", "there is nothing; check the path"),
        (tmp_path / "logs", "got a folder with dt=2026-01-01; pass the --output"),
        (tmp_path / "empty", "got an empty folder; pass"),
        (tmp_path / "unfinished", "got a run without a complete checkpoint; run its training"),
        (file, "got a file; name its folder"),
    ):
        with pytest.raises(ValueError, match=rf"expected a checkpoint .* {found}"):
            read_manifest(path)


def test_a_manifest_that_says_something_else_than_was_written_is_named(tmp_path):
    target = tmp_path / "step-7"
    content = {**SAVED, "step": 7, "rows": 70, "ranks": [{1: 0.1, 10: math.nan, 2: "\u00e9"}]}
    commit(draft(target), target, content)
    found = read_manifest(target)
    assert found["rows"] == 70 and "checksum" not in found
    text = (target / MANIFEST).read_text()
    for old, new in (('"rows": 70', '"rows": 71'), ("0.1", "0.2"), ("world_size", "world_sise")):
        (target / MANIFEST).write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=r"manifest\.json: damaged .its content has the check"):
            read_manifest(target)
    (target / MANIFEST).write_text(json.dumps(json.loads(text)))
    assert read_manifest(target) == found, "however it is laid out"
