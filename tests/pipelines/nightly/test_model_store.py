# SPDX-License-Identifier: MIT
"""The pointer leads to a model that is whole, and what lies in the folder misleads nobody."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from pipelines import publish
from pipelines.nightly.model_store import Store

EARLY, MIDDLE, LATE = (f"2026-01-0{day}" for day in (3, 4, 5))


@pytest.fixture
def store(tmp_path):
    """Three published models, of which the last serves."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "part.bin").write_bytes(b"weights")
    (checkpoint / "manifest.json").write_text(json.dumps({"files": {"part.bin": [7, 0]}}))
    found = Store(tmp_path / "out")
    for date in (EARLY, MIDDLE, LATE):
        model = {"trained_through": "2026-01-02", "metrics": {"auc": 0.7}}
        found.keep("models", date, checkpoint, model)
        # The store's are other names of the same files.
        for path in found.checkpoint(date).iterdir():
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)
    found.point(LATE, "promoted")
    return found


def lose_all(checkpoint):
    shutil.rmtree(checkpoint)


def lose_a_file(checkpoint):
    (checkpoint / "part.bin").unlink()


def lose_the_manifest(checkpoint):
    (checkpoint / "manifest.json").unlink()


def cut_a_file_short(checkpoint):
    (checkpoint / "part.bin").write_bytes(b"weigh")


def damage_the_manifest(checkpoint):
    (checkpoint / "manifest.json").write_text('{"files": {"part.bin"')


def make_it_a_loop(checkpoint):
    shutil.rmtree(checkpoint)
    checkpoint.symlink_to(checkpoint)


LOSSES = [lose_all, lose_a_file, lose_the_manifest, cut_a_file_short, damage_the_manifest]
LOSSES += [make_it_a_loop]


@pytest.mark.parametrize("lose", LOSSES)
@pytest.mark.parametrize("words", [["--rollback"], ["--serve", MIDDLE]])
def test_the_pointer_does_not_move_to_a_model_whose_checkpoint_is_gone(store, lose, words, capsys):
    before = (store.folder / "serving.json").read_bytes()
    lose(store.checkpoint(MIDDLE))
    assert publish.main([str(store.folder), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the checkpoint of the model of {MIDDLE} cannot be served" in line
    assert "the pointer was not moved" in line
    assert (store.folder / "serving.json").read_bytes() == before
    assert not store.models()[LATE]["withdrawn"], "nothing was withdrawn either"
    assert publish.main([str(store.folder), "--serve", EARLY]) == 0
    assert store.serving() == EARLY


def test_a_withdrawn_model_whose_checkpoint_is_gone_stays_withdrawn(store):
    store.roll_back("bad")
    lose_all(store.checkpoint(LATE))
    with pytest.raises(ValueError, match="cannot be served"):
        store.serve(LATE, "again")
    assert store.models()[LATE]["withdrawn"] and store.serving() == MIDDLE


@pytest.mark.parametrize(
    "name", ["2026-01-06\nalert: forged", "latest", "2026-13-45", ".2026-01-06.partial", "20260106"]
)
def test_a_folder_that_is_no_date_is_no_model(store, name, capsys):
    shutil.copytree(store.folder / "models" / LATE, store.folder / "models" / name)
    assert list(store.models()) == [EARLY, MIDDLE, LATE]
    assert publish.main([str(store.folder)]) == 0
    assert not any(line.startswith("alert") for line in capsys.readouterr().out.splitlines())


def test_reasons_in_a_record_cannot_begin_a_line_nor_steer_a_terminal(store, capsys):
    path = store.folder / "models" / LATE / "model.json"
    record = {"trained_through": "x\nalert: one", "reasons": ["a\nalert: two", "\x1b[2Jgone", 3]}
    path.write_text(json.dumps(record))
    store.roll_back("c\nalert: three")
    assert publish.main([str(store.folder)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\\x1b[2Jgone; 3" in shown
    assert not any(line.startswith("alert") for line in shown.splitlines())


@pytest.mark.parametrize(
    "record",
    [
        *('{"trained_through": 3}', '{"days": {}}', "[]", "[" * 5000, '{"trained_through": "'),
        *(
            json.dumps({"trained_through": "", **change})
            for change in ({"days": []}, {"base": 3}, {"metrics": []}, {"reasons": "none"})
        ),
    ],
)
def test_a_damaged_record_is_named(store, record, capsys):
    (store.folder / "models" / MIDDLE / "model.json").write_text(record)
    assert publish.main([str(store.folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{MIDDLE}/model.json" in line and "remove it or restore it" in line


def test_a_pipe_in_the_place_of_a_record_does_not_hang(store, capsys):
    (store.folder / "serving.json").unlink()
    os.mkfifo(store.folder / "serving.json")
    assert publish.main([str(store.folder)]) == 1
    assert "serving.json" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["partial", "replaced"])
def test_a_planted_link_is_replaced_and_not_followed(store, word, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept.txt").write_text("kept")
    (store.folder / "models" / f".{EARLY}.{word}").symlink_to(victim, target_is_directory=True)
    store.keep("models", EARLY, tmp_path / "checkpoint", {"trained_through": ""})
    assert [path.name for path in victim.iterdir()] == ["kept.txt"]
    assert (store.checkpoint(EARLY) / "part.bin").read_bytes() == b"weights"


def test_a_pointer_that_is_a_link_is_replaced_and_not_followed(store, tmp_path):
    victim = tmp_path / "victim.json"
    victim.write_text(json.dumps({"model": LATE}))
    (store.folder / "serving.json").unlink()
    (store.folder / "serving.json").symlink_to(victim)
    store.point(MIDDLE, "by hand")
    assert json.loads(victim.read_text()) == {"model": LATE}
    assert store.serving() == MIDDLE and not (store.folder / "serving.json").is_symlink()
