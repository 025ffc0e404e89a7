# SPDX-License-Identifier: MIT
"""Nights with the real trainer: killed at any place they end with the same table, and bad days.

What the other tests of nights let a few lines of Python stand in for trains and compares here, in
forks of one process that has imported it.
"""

import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.nightly.model_store import Store
from pipelines.orchestration import launch
from pipelines.orchestration.launch import LaunchConfig
from pipelines.synthesize import SynthesisConfig, synthesize
from pipelines.synthetic.click_model import ClickConfig
from tests.faults.harness import Zygote

# Where a replay is killed, in its order; each goes on where the one before has left.
NIGHT, LATER = "nights/2026-01-03", "nights/2026-01-04"
PLACES = {
    "the first day of a night, typed": r"rename data/\.\S+ data/dt=2026-01-01",
    "a day without its manifest": r"open data/dt=2026-01-03/\.?_manifest",
    "days, taken in": rf"rename \S+ {NIGHT}/partitions",
    "a checkpoint of the candidate": rf"rename {NIGHT}/\S+incomplete \S+step-8",
    "the trained candidate": rf"rename {NIGHT}/\.candidate\.unfinished",
    "its evaluation": rf"open {NIGHT}/\.evaluation\.unfinished/\.?comparison",
    "its publication": r"rename models/\.2026-01-03\.partial",
    "the first pointer": r"rename \S+ serving\.json",
    "the metrics of a night": r"rename \S+ night\.prom",
    "a candidate that has begun from the model": rf"rename {LATER}/\S+incomplete \S+step-4",
    "half a copy of the candidate": r"link \S+ models/\.2026-01-04",
}
WORDS = ["--recipe", "dlrm.demo", "-j", "1x1", "--days", "4", "--no-scratch", "--"]
WORDS += ["--retries", "0", "--replicates", "20", "--gate-min-rows", "10", "--gate-max-drift", "9"]
WORDS += ["--gate-min-auc", "0", "--gate-max-calibration-error", "9", "--gate-max-auc-loss", "1"]
WORDS += ["--gate-max-logloss-gain", "1", "--gate-max-gauc-loss", "1"]
WORDS += ["--gate-max-calibration-gain", "9", "--"]
WORDS += ["--loader.batch-size", "32", "--telemetry.mode", "quiet", "--runtime.num-threads", "1"]
WORDS += ["--checkpoint.interval-steps", "4", "--checkpoint.interval-seconds", "0"]


class Replay:
    """A replay in a folder of its own."""

    def __init__(self, zygote, folder, logs):
        folder.mkdir()
        self.zygote, self.output, self.folder = zygote, folder / "out", folder
        self.words = ["--data", str(logs), "--output", str(self.output), *WORDS]

    def run(self, kill=None):
        """Run it, or go on, until it ends or is killed; return its exit code and what it said."""
        log = self.folder / "log"
        log.unlink(missing_ok=True)
        answer = self.zygote.ask(
            module="tests.support.replays",
            function="main",
            arguments=[self.words, str(self.output), kill, str(self.folder / "changes")],
            environment={},
            log=str(log),
        )
        code = self.zygote.ask(wait=answer["pid"], seconds=200)["code"]
        return code, log.read_text()

    def changes(self):
        return (self.folder / "changes").read_text().splitlines()

    def left(self, said):
        """What a finished replay has made: its table without seconds, metrics, the pointer."""
        table = [line for line in said.splitlines() if re.match(r"2026-01-0\d  ", line)]
        found = {"table": [line.rpartition(" ")[0].rstrip() for line in table[-2:]]}
        for path in sorted(self.output.rglob("comparison.json")):
            answer = json.loads(path.read_text())
            kept = [{k: v for k, v in m.items() if "seconds" not in k} for m in answer["models"]]
            name = str(path.relative_to(self.output))
            found[name] = [kept, answer.get("differences")]
        found["pointer"] = json.loads((self.output / "serving.json").read_text())["model"]
        hidden = [path for path in self.output.glob("**/.*.unfinished")]
        hidden += self.output.glob("*/.*.partial")
        return {**found, "unfinished": hidden}


@pytest.fixture(scope="module")
def zygote():
    found = Zygote()
    found.ask(**{"import": "tests.support.replays"})
    yield found
    found.close()


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    clicks = ClickConfig(num_users=50, num_items=60)
    synthesize(folder, SynthesisConfig(days=4, rows_per_day=200, clicks=clicks))
    return folder


@pytest.fixture(scope="module")
def undisturbed(zygote, logs, tmp_path_factory):
    replay = Replay(zygote, tmp_path_factory.mktemp("undisturbed") / "replay", logs)
    code, said = replay.run()
    assert code == 0, said[-3000:]
    found = replay.left(said)
    assert [line.split()[0] for line in found["table"]] == ["2026-01-03", "2026-01-04"]
    assert found["pointer"] == "2026-01-04" and not found["unfinished"]
    return found


def test_a_replay_killed_at_every_stage_ends_with_the_same_table(
    zygote, logs, undisturbed, tmp_path
):
    replay = Replay(zygote, tmp_path / "replay", logs)
    for name, place in PLACES.items():
        code, said = replay.run({"match": place, "count": 1})
        assert code == -9, f"{name}: expected to be killed there, got {code}: {said[-2000:]}"
    code, said = replay.run()
    assert code == 0, said[-3000:]
    assert replay.left(said) == undisturbed
    killed = [line for line in replay.changes() if line.startswith("killed before")]
    assert len(killed) == len(PLACES)


def test_a_replay_killed_at_random_again_and_again_ends_with_the_same_table(
    zygote, logs, undisturbed, tmp_path
):
    replay, draw, codes = Replay(zygote, tmp_path / "replay", logs), random.Random(0), []
    while 0 not in codes and len(codes) < 7:
        code, said = replay.run({"match": "", "count": draw.randint(30, 80)})
        codes.append(code)
    if codes[-1]:
        code, said = replay.run()
        codes.append(code)
    assert codes[-1] == 0, said[-3000:]
    assert codes.count(-9) >= 3 and {*codes} == {0, -9}
    assert replay.left(said) == undisturbed


def change(day, columns):
    """Write a raw day again, its columns changed by functions of their arrays."""
    (path,) = day.glob("*.parquet")
    table = pq.read_table(path, partitioning=None)
    for name, function in columns.items():
        column = pa.array(function(table.column(name).to_numpy()), table.schema.field(name).type)
        table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, path)


def test_flipped_labels_are_refused_a_day_of_unseen_ids_is_measured_and_a_good_one_recovers(
    zygote, tmp_path
):
    days, raw = [f"2026-01-0{number}" for number in range(1, 6)], tmp_path / "raw"
    clicks = ClickConfig(num_users=200, num_items=60)
    synthesize(raw, SynthesisConfig(days=5, rows_per_day=1500, clicks=clicks))
    log = tmp_path / "log"

    def nights(*dates):
        words = ["--recipe", "dlrm.demo", "--raw", str(raw), "--output", str(tmp_path / "out")]
        words += ["--ready", "manifest", "--first-days", "2", "--retries", "0"]
        words += ["--gate-max-drift", "9", "--gate-max-calibration-error", "0.5"]
        words += ["--replicates", "50", "--", "--telemetry.mode", "quiet"]
        words += ["--loader.batch-size", "64", "--runtime.num-threads", "1"]
        words += ["--dense.learning-rate", "0.01", "--sparse.learning-rate", "0.1"]
        log.unlink(missing_ok=True)
        request = {"module": "tests.support.replays", "function": "nights", "environment": {}}
        several = [["--date", date, *words] for date in dates]
        pid = zygote.ask(**request, arguments=[several], log=str(log))["pid"]
        assert zygote.ask(wait=pid, seconds=250)["code"] == 0, log.read_text()[-3000:]
        (codes,) = re.findall(r"^codes \[(.*)\]$", log.read_text(), re.MULTILINE)
        return [int(code) for code in codes.split(", ")], log.read_text()

    def flip():
        change(raw / f"dt={days[3]}", {"click": lambda clicked: 1 - clicked})

    store = Store(tmp_path / "out")
    flip()
    codes, said = nights(*days[2:4])
    assert codes == [0, 3] and store.serving() == days[2]
    assert store.models()[days[2]]["metrics"]["auc"] > 0.6, "there was something to learn"
    assert re.search(r"refused: auc is 0\.[0-4]\d*, below --gate-min-auc 0\.5", said)
    # The producer mends the day, but its ids are all new: what is left to the models is dense.
    flip()
    ids = ("user_id", "item_id", "category_id", "brand_id")
    change(raw / f"dt={days[3]}", {name: lambda values: values + 10**12 for name in ids})
    codes, said = nights(days[3], days[4])
    assert codes[0] in (0, 3) and codes[1] == 0
    assert f"{days[3]}: changed, 1,500 rows" in said
    unseen = store.models("refused" if codes[0] else "models")[days[3]]["metrics"]
    assert unseen["rows"] == 1500 and 0.4 < unseen["auc"] < 0.65
    assert unseen["nonfinite_predictions"] == 0
    assert store.models()[days[4]]["metrics"]["auc"] > 0.6 and store.serving() == days[4]


def until(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_a_command_ends_with_the_pipeline_that_started_it(tmp_path):
    note = tmp_path / "note"
    text = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(90)"
    pid = os.fork()
    if not pid:
        try:
            LaunchConfig().start([sys.executable, "-c", text], tmp_path / "log", lambda line: None)
        finally:
            os._exit(0)
    until(lambda: note.exists() and note.read_text(), "the command did not start")
    command = Path(f"/proc/{note.read_text()}")
    assert command.exists()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    until(lambda: not command.exists() or " Z " in (command / "stat").read_text(), "it lives on")


def test_a_training_waits_for_one_that_was_left_by_a_killed_run(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_BUSY_PAUSE", 0.01)
    text = """if 1:
        import pathlib, sys
        tries = pathlib.Path(sys.argv[1])
        tries.write_text((tries.read_text() if tries.exists() else "") + "x")
        if len(tries.read_text()) < 3:
            print("error: run: another process trains in this folder; wait for it", file=sys.stderr)
            sys.exit(2)
    """
    said, tries = [], tmp_path / "tries"
    command = [sys.executable, "-c", text, str(tries)]
    LaunchConfig().start(command, tmp_path / "log", said.append)
    assert tries.read_text() == "xxx"
    assert [line for line in said if "was killed is ending; waiting" in line]
    tries.unlink()
    monkeypatch.setattr(launch, "_BUSY_SECONDS", 0.0)
    with pytest.raises(ValueError, match="another process trains in this folder"):
        LaunchConfig().start(command, tmp_path / "log", said.append)
