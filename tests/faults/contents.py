# SPDX-License-Identifier: MIT
"""Faults of what lies on the disk: logs that change meanwhile, damaged checkpoints."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.faults import job
from tests.faults.fault import at, fault
from tests.faults.harness import Place, expect
from tests.support.runs import DAYS
from trainer.checkpoint.layout import complete

# Data that changes between save and resume.


def _cut(place: Place) -> Path:
    """Kill a run on a copy of the log in the middle of its first epoch; return the copy."""
    logs = place.folder / "logs"
    shutil.copytree(place.harness.logs, logs)
    day = logs / f"dt={DAYS[0]}"
    (whole,) = day.glob("*.parquet")
    table = pq.ParquetFile(whole).read()
    whole.unlink()
    half = table.num_rows // 2
    for number, part in enumerate((table.slice(0, half), table.slice(half))):
        pq.write_table(part, day / f"part-{number}.parquet")
    place.fail(at(4, "kill", 1), logs=logs)
    expect(place.steps, "expected a checkpoint in the middle of the epoch")
    return day


def _refused(place: Place, day: Path, change: Callable[[], object], *names: str) -> str:
    """Change the log, see it refused by name, put it back, and go on."""
    before = place.folder / "before"
    shutil.copytree(day, before)
    change()
    ranks = place.run(logs=day.parent)
    expect([rank.code for rank in ranks] == [2, 2], place.tail(ranks))
    for name in names:
        expect(name in ranks[0].said, f"{name!r} is not named: {place.tail(ranks)}")
    shutil.rmtree(day)
    before.rename(day)
    place.finish(logs=day.parent)
    rows = job.rows_seen(place.output, [(10**9, 2)])
    counts = [sum(epoch.values()) for epoch in rows]
    expect(rows == place.harness.reference()["rows"], f"rows lost or trained twice: {counts}")
    return "refused by name; put back: every row once an epoch"


@fault("a Parquet file is cut short between save and resume")
def truncated(place: Place) -> str:
    """The file is named before training; put back, every row is trained once an epoch."""
    day = _cut(place)
    path = day / "part-1.parquet"
    return _refused(
        place, day, lambda: os.truncate(path, path.stat().st_size - 200), str(path), "truncated"
    )


@fault("a Parquet file is deleted between save and resume")
def deleted(place: Place) -> str:
    """The position is refused, as the log is another; put back, every row once an epoch."""
    day = _cut(place)
    return _refused(place, day, (day / "part-1.parquet").unlink, "expected log")


@fault("a Parquet file is added between save and resume")
def appended(place: Place) -> str:
    """The position is refused, as the log is another; taken away, every row once an epoch."""
    day = _cut(place)
    return _refused(
        place,
        day,
        lambda: shutil.copy(day / "part-1.parquet", day / "part-2.parquet"),
        "expected log",
    )


@fault("two Parquet files change places between save and resume", quick=True)
def swapped(place: Place) -> str:
    """The position is refused although all sizes are equal; put back, every row once an epoch."""
    day = _cut(place)

    def swap() -> None:
        (day / "part-0.parquet").rename(day / "x")
        (day / "part-1.parquet").rename(day / "part-0.parquet")
        (day / "x").rename(day / "part-1.parquet")

    return _refused(place, day, swap, "expected log")


@fault("rows of a Parquet file are rewritten between save and resume")
def rewritten(place: Place) -> str:
    """The position is refused although all counts are equal; put back, every row once an epoch."""
    day = _cut(place)
    path = day / "part-0.parquet"

    def rewrite() -> None:
        table = pq.ParquetFile(path).read()
        pq.write_table(table.take(list(range(table.num_rows - 1, -1, -1))), path)

    return _refused(place, day, rewrite, "expected log")


# Checkpoints that are damaged.


def _damaged(place: Place, damage: Callable[[Path], object], *names: str) -> str:
    """Kill a run, damage its newest checkpoint, see it named, remove it, go on from the older."""
    place.fail(at(7, "kill", 1))
    newest = complete(place.output / "checkpoints")[-1]
    damage(newest)
    ranks = place.run()
    expect([rank.code for rank in ranks] == [2, 2], place.tail(ranks))
    for name in (newest.name, *names):
        expect(name in ranks[0].said, f"{name!r} is not named: {place.tail(ranks)}")
    shutil.rmtree(newest)
    again = place.finish()
    expect("resumed at step " in again[0].said, place.tail(again))
    return f"named; from the older one {place.equals_reference()}"


@fault("a manifest is cut short")
def manifest_cut(place: Place) -> str:
    """It is named; the older checkpoint gives the undisturbed run."""
    return _damaged(
        place, lambda path: os.truncate(path / "manifest.json", 500), "manifest.json: damaged"
    )


@fault("one number of a manifest changes")
def manifest_changed(place: Place) -> str:
    """It is named, although it is a manifest; the older checkpoint gives the undisturbed run."""

    def change(path: Path) -> None:
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace('"rows": ', '"rows": 1', 1))

    return _damaged(place, change, "manifest.json: damaged (its content has the checksum")


@fault("a run's config.json is cut short")
def config_cut(place: Place) -> str:
    """It is named with a way out; put back from a checkpoint, the run is the undisturbed one."""
    place.fail(at(7, "kill", 1))
    config = place.output / "config.json"
    os.truncate(config, 200)
    ranks = place.run()
    expect([rank.code for rank in ranks] == [2, 2], place.tail(ranks))
    expect("config.json: damaged" in ranks[0].said, place.tail(ranks))
    newest = complete(place.output / "checkpoints")[-1]
    content = json.loads((newest / "manifest.json").read_text())
    config.write_text(json.dumps(content["config"]))
    place.finish()
    return f"named; {place.equals_reference()}"


@fault("a manifest is lost")
def manifest_lost(place: Place) -> str:
    """Without its manifest it is no checkpoint: the older one gives the undisturbed run."""
    place.fail(at(7, "kill", 1))
    (complete(place.output / "checkpoints")[-1] / "manifest.json").unlink()
    ranks = place.finish()
    expect("resumed at step " in ranks[0].said, place.tail(ranks))
    return place.equals_reference()


@fault("one bit of a shard flips")
def bit_flipped(place: Place) -> str:
    """The file is named before anything is loaded; the older one gives the undisturbed run."""

    def flip(path: Path) -> None:
        shard = path / "rank-0.bin"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 4
        shard.write_bytes(content)

    return _damaged(place, flip, "rank-0.bin: damaged")


@fault("a shard is lost")
def shard_lost(place: Place) -> str:
    """The file is named; the older one gives the undisturbed run."""
    return _damaged(
        place, lambda path: (path / "rank-1.bin").unlink(), "rank-1.bin: cannot be read"
    )


@fault("the index of a checkpoint is cut short")
def index_cut(place: Place) -> str:
    """The file is named; the older one gives the undisturbed run."""

    def cut(path: Path) -> None:
        os.truncate(path / "index.json", 300)

    return _damaged(place, cut, "index.json: damaged")


@fault("a checkpoint is forged to run code, with checksums that fit")
def forged(place: Place) -> str:
    """It is refused, and nothing of it runs; the older one gives the undisturbed run."""
    sign = place.folder / "executed"

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(sign),)

    def forge(path: Path) -> None:
        content = json.loads((path / "manifest.json").read_text())
        del content["checksum"]
        for name in ("index.json", "rank-0.bin"):
            (path / name).write_bytes(pickle.dumps(Bomb()))
            data = (path / name).read_bytes()
            content["files"][name] = [len(data), zlib.crc32(data)]
        (path / "manifest.json").write_text(json.dumps(content))

    got = _damaged(place, forge, "index.json: damaged")
    expect(not sign.exists(), "code of the checkpoint ran")
    return got


@fault("links are planted in the place of a run's files")
def planted_links(place: Place) -> str:
    """What they lead to stays as it is; the run is the undisturbed one."""
    place.fail(at(7, "kill", 0))
    victim = place.folder / "victim"
    victim.write_text("of somebody else")
    for name in ("ranks.json", "metrics.json.partial", "evaluations.jsonl", ".config.json.partial"):
        (place.output / name).unlink(missing_ok=True)
        (place.output / name).symlink_to(victim)
    place.finish()
    expect(victim.read_text() == "of somebody else", "the file behind a link was written")
    expect(not (place.output / "metrics.json").is_symlink(), "the metrics are behind a link")
    return place.equals_reference()


@fault("ids are hashed in another way than when the checkpoint was written")
def other_routing(place: Place) -> str:
    """The checkpoint is refused by name instead of read at the wrong rows."""

    def change(path: Path) -> None:
        content = json.loads((path / "manifest.json").read_text())
        del content["checksum"]
        content["routing_fingerprint"] = "0" * len(content["routing_fingerprint"])
        (path / "manifest.json").write_text(json.dumps(content))

    return _damaged(place, change, "routing of ids to table rows")


@fault("the curve file is cut short by a crash")
def curves_cut(place: Place) -> str:
    """The half line is dropped; the run is the undisturbed one."""
    place.fail(at(7, "kill", 0))
    with (place.output / "curves.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    place.finish()
    return place.equals_reference()


@fault("strange files among the checkpoints")
def strange_files(place: Place) -> str:
    """They are left alone; the run is the undisturbed one."""
    place.fail(at(7, "kill", 0))
    for name in ("step-notes", "step-99", "step-4.old"):
        (place.output / "checkpoints" / name).mkdir()
    place.finish()
    left = {path.name for path in (place.output / "checkpoints").iterdir()}
    expect({"step-notes", "step-99", "step-4.old"} <= left, f"left: {left}")
    return place.equals_reference()
