# SPDX-License-Identifier: MIT
"""Raw days: when they are ready, that they come once, late or again, and what a schema may do."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.deliveries import Intake, main
from pipelines.ingestion.ingestion import IngestConfig
from pipelines.ingestion.partition import MANIFEST, read_manifests
from pipelines.ingestion.readiness import Readiness
from tests.support.raw_logs import NOON, flat_schema, read_day

DAYS = ["2026-01-01", "2026-01-02", "2026-01-03"]


def write(folder, name="log.parquet", users=(1, 2, 3), order=1, **more):
    folder.mkdir(parents=True, exist_ok=True)
    columns = {"user": pa.array(users), "ts": [NOON] * len(users), "click": [1] * len(users)}
    names = [*columns, *more][::order]
    pq.write_table(pa.table({n: {**columns, **more}[n] for n in names}), folder / name)


@pytest.fixture
def raw(tmp_path):
    for day in DAYS:
        write(tmp_path / f"raw/dt={day}")
    return tmp_path / "raw"


@pytest.fixture
def take(raw, tmp_path):
    """Return a function that takes days in; it returns their states and what was said."""

    def run(days=DAYS, config=None, place=raw):
        said = []
        config = config or IngestConfig()
        intake = Intake(
            raw=str(place), output=tmp_path / "out", schema=flat_schema(), config=config
        )
        return [one.state for one in intake.take(days, said.append)], said

    return run


def test_each_mark_makes_a_day_ready(raw):
    def days(mark, **more):
        return Readiness(mark=mark, **more).days(str(raw))

    assert days("files") == DAYS and days("manifest") == days("success") == []
    (raw / f"dt={DAYS[0]}/_SUCCESS").touch()
    (raw / f"dt={DAYS[1]}/{MANIFEST}").write_text("{}")
    write(raw / f"dt={DAYS[2]}", "more.parquet")
    assert days("success") == DAYS[:1] and days("manifest") == DAYS[1:2]
    assert days("rows", min_rows=6) == DAYS[2:] and days("rows", min_rows=3) == DAYS
    assert days("watermark") == []
    for text, last in ((DAYS[1], 2), (f"{DAYS[1]}T23:00:00+00:00", 1), ("2026-01-04T00:30", 3)):
        (raw / "_watermark").write_text(text + "\n")
        assert days("watermark") == DAYS[:last]
    (raw / "_watermark").write_text("soon")
    with pytest.raises(ValueError, match="_watermark: expected a day YYYY-MM-DD or a time"):
        days("watermark")
    for wrong in ({"mark": "rows"}, {"mark": "files", "min_rows": 3}, {"mark": "done"}):
        with pytest.raises(ValueError, match="--ready"):
            Readiness(**wrong)


def test_the_same_delivery_does_nothing_and_a_changed_one_takes_its_place(take, raw, tmp_path):
    assert take()[0] == ["new"] * 3
    out = tmp_path / "out"
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    for path in raw.rglob("*.parquet"):
        path.touch()  # the same bytes, copied once more
    assert take() == (["same"] * 3, [])
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")} == stamps
    write(raw / f"dt={DAYS[1]}", "late.parquet", users=(4, 5))
    states, (line,) = take()
    assert states == ["same", "changed", "same"]
    assert line == f"{DAYS[1]}: changed, 5 rows, 2 files to 1; 1 files added"
    assert sorted(read_day(out, DAYS[1]).column("user").to_pylist()) == [1, 2, 3, 4, 5]
    write(raw / f"dt={DAYS[2]}", users=(7,))
    assert take()[1] == [f"{DAYS[2]}: changed, 1 rows, 1 files to 1; 1 files changed"]
    # By another setting the same raw rows may become other rows.
    assert take(config=IngestConfig(max_bad_share=0.5))[0] == ["changed"] * 3


def test_a_delivery_that_fails_leaves_the_day_as_it_was(take, raw, tmp_path):
    take()
    (raw / f"dt={DAYS[1]}/log.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        take()
    assert list(read_manifests(tmp_path / "out")) == DAYS
    assert read_day(tmp_path / "out", DAYS[1]).num_rows == 3


def test_columns_may_come_and_move_but_not_change_their_type_or_go(take, raw, tmp_path):
    take(DAYS[:1])
    write(raw / f"dt={DAYS[1]}", order=-1, campaign=["x", "y", "z"])
    take(DAYS[:2])
    assert read_day(tmp_path / "out", DAYS[1]).equals(read_day(tmp_path / "out", DAYS[0]))
    write(raw / f"dt={DAYS[2]}", users=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"2026-01-03/log.parquet: column 'user': expected int,"):
        take()
    table = pq.read_table(raw / f"dt={DAYS[0]}/log.parquet", partitioning=None)
    pq.write_table(table.drop_columns(["click"]), raw / f"dt={DAYS[2]}/log.parquet")
    with pytest.raises(ValueError, match=r"2026-01-03/log.parquet: missing columns: 'click'"):
        take()
    assert list(read_manifests(tmp_path / "out")) == DAYS[:2]


def test_many_small_files_become_few_and_keep_their_rows(take, raw, tmp_path):
    day = raw / f"dt={DAYS[0]}"
    (day / "log.parquet").unlink()
    for number in range(150):
        write(day, f"part-{number:04d}.parquet", users=(number,))
    assert "150 files to 1" in take(DAYS[:1])[1][0]
    assert read_day(tmp_path / "out").column("user").to_pylist() == list(range(150))


def test_raw_days_may_lie_behind_a_url(take, raw, tmp_path):
    store = fsspec.filesystem("memory")
    for path in raw.rglob("*.parquet"):
        store.put_file(str(path), f"/bucket/raw/{path.relative_to(raw)}")
    store.pipe_file(f"/bucket/raw/dt={DAYS[0]}/more.csv", f"user,ts,click\n9,{NOON},0\n".encode())
    store.pipe_file(f"/bucket/raw/dt={DAYS[0]}/_SUCCESS", b"")
    url = "memory://bucket/raw"
    try:
        assert Readiness(mark="success").days(url) == DAYS[:1]
        assert take(place=url)[0] == ["new"] * 3
        assert take(place=url)[0] == ["same"] * 3
        assert read_day(tmp_path / "out").column("user").to_pylist() == [1, 2, 3, 9]
        intake = Intake(
            raw=url, output=tmp_path / "out", schema=flat_schema(), config=IngestConfig()
        )
        before = intake.stamps(DAYS[0])
        store.pipe_file(f"/bucket/raw/dt={DAYS[0]}/more.csv", b"user,ts,click\n")
        assert intake.stamps(DAYS[0]) != before
    finally:
        store.rm("/bucket", recursive=True)


def test_processes_share_the_days_and_may_write_at_the_same_time(raw, tmp_path, capsys):
    (tmp_path / "schema.yaml").write_text(json.dumps(flat_schema().to_dict()))
    words = [str(raw), "--schema", str(tmp_path / "schema.yaml")]
    words += ["--output", str(tmp_path / "out"), "--ready", "files"]
    codes = []
    parts = [
        threading.Thread(target=lambda part=part: codes.append(main([*words, "--part", part])))
        for part in ("0/2", "1/2")
    ]
    for part in parts:
        part.start()
    for part in parts:
        part.join()
    assert codes == [0, 0]
    assert list(read_manifests(tmp_path / "out")) == DAYS
    capsys.readouterr()
    assert main(words) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[2:]] == ["same"] * 3
    assert main([*words, "--part", "2/2"]) == 2
    assert "--part: expected NUMBER/COUNT" in capsys.readouterr().err
    shutil.rmtree(raw)
    raw.mkdir()
    assert main(words) == 4
    assert "no day is ready; a day is ready with any file" in capsys.readouterr().err


@pytest.mark.launch
def test_torchx_starts_processes_that_share_the_days(raw, tmp_path):
    (tmp_path / "schema.yaml").write_text(json.dumps(flat_schema().to_dict()))
    words = [str(raw), "--schema", str(tmp_path / "schema.yaml")]
    words += ["--output", str(tmp_path / "out"), "--ready", "files"]
    torchx = [sys.executable, "-m", "torchx.cli.main", "run", "-s", "local_cwd", "dist.ddp"]
    scripts = str(Path(sys.executable).parent)  # where torchrun is
    done = subprocess.run(
        [*torchx, "-j", "1x2", "-m", "pipelines.deliveries", "--", *words],
        env={**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(read_manifests(tmp_path / "out")) == DAYS
    for rank in (0, 1):
        assert re.search(rf"\[{rank}\]:2026-01-0\d: new, 3 rows", done.stderr), done.stderr


def test_a_day_behind_a_link_is_delivered_and_a_loop_in_it_adds_nothing(tmp_path):
    table = pa.table({"user": [1, 2], "ts": [NOON, NOON], "click": [0, 1]})
    (tmp_path / "archive" / "x").mkdir(parents=True)
    (tmp_path / "raw").mkdir()
    pq.write_table(table, tmp_path / "archive" / "x" / "a.parquet")
    (tmp_path / "archive" / "x" / "loop").symlink_to("..")
    (tmp_path / "archive" / "x" / "again.parquet").symlink_to("a.parquet")
    (tmp_path / "raw" / "dt=2026-01-01").symlink_to(tmp_path / "archive" / "x")
    (tmp_path / "s.yaml").write_text(json.dumps(flat_schema().to_dict()))
    arguments = [str(tmp_path / "raw"), "--schema", str(tmp_path / "s.yaml"), "--output"]
    assert main([*arguments, str(tmp_path / "out"), "--ready", "rows", "--ready-rows", "2"]) == 0
    manifest = json.loads((tmp_path / "out/dt=2026-01-01/_manifest.json").read_text())
    assert manifest["rows"] == 2 and list(manifest["made_from"]["files"]) == ["a.parquet"]
