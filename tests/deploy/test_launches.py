# SPDX-License-Identifier: MIT
"""Jobs that torchx really starts on this machine: nodes that meet, and raw logs to a night."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from pipelines.nightly.model_store import Store

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-m", "torchx.cli.main", "run", "-s", "local_cwd"]
TOY = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} sees {total.item():.0f} of {sys.argv[1:]}", flush=True)
if "--fail" in sys.argv and dist.get_rank() == 1:
    sys.exit(3)
dist.barrier()  # as in training, nobody finishes whose partner has failed
dist.destroy_process_group()
"""
DAYS = ("2026-01-01", "2026-01-02")
SCHEMA = {
    "tables": [
        {"name": name, "num_embeddings": 64, "embedding_dim": 8} for name in ("user", "item")
    ],
    "sparse": [
        {"name": "user", "table": "user"},
        {"name": "item", "table": "item", "side": "item"},
    ],
    "labels": [{"name": "click"}],
    "user": "user",
    "timestamp": "time",
}


def launch(folder: Path, component: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*LAUNCH, f"{ROOT / 'deploy' / 'components.py'}:{component}", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A folder with a stand-in for the trainer; torchx starts local nodes in the current folder."""
    (tmp_path / ".torchxconfig").touch()
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").touch()  # before an installed package of that name
    (tmp_path / "trainer" / "train.py").write_text(TOY)
    return tmp_path


@pytest.mark.launch
def test_two_local_nodes_meet_and_both_are_heard(toy: Path) -> None:
    words = ["--recipe", "toy", "-j", "2x1", "--output", "out", "--", "--data.path", "a b"]
    done = launch(toy, "train", *words)
    assert done.returncode == 0, done.stderr
    words = ["toy", "--output", "out", "--data.path", "a b"]
    for rank in range(2):
        assert f"rank {rank} sees 2 of {words}" in done.stderr
    assert {line.split()[0] for line in done.stderr.splitlines() if " sees " in line} == {
        "train/0",
        "train/1",
    }


@pytest.mark.launch
def test_the_command_fails_when_one_rank_fails(toy: Path) -> None:
    done = launch(toy, "train", "--recipe", "toy", "-j", "2x1", "--", "--fail")
    assert done.returncode == 1, done.stderr
    assert "exitcode  : 3" in done.stderr


def write_raw_logs(folder: Path) -> None:
    """Write days of CSV of users who click on items of their own parity, and the schema."""
    generator = np.random.default_rng(0)
    (folder / "schema.yaml").write_text(yaml.safe_dump(SCHEMA))
    for day in DAYS:
        part = folder / "raw" / f"dt={day}"
        part.mkdir(parents=True)
        with (part / "clicks.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["user", "item", "click", "time"])
            for user, item in generator.integers(0, 40, (600, 2)).tolist():
                click = int(user % 2 == item % 2)
                rows.writerow([f"u{user}", f"i{item}", click, f"{day}T12:00:00"])
        (part / "_SUCCESS").touch()


@pytest.mark.launch
def test_raw_days_become_typed_days_a_published_model_and_its_metrics(tmp_path: Path) -> None:
    write_raw_logs(tmp_path)
    raw, schema, data, output = (
        str(tmp_path / name) for name in ("raw", "schema.yaml", "data", "nights")
    )
    words = ["--raw", raw, "--schema", schema, "--output", data, "-j", "1x2"]
    done = launch(ROOT, "ingest", *words)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in Path(data).glob("dt=*")) == [f"dt={day}" for day in DAYS]

    night = ["--recipe", "dlrm.demo", "--data", data, "--output", output, "--date", DAYS[1]]
    gates = ["--gate-min-rows", "1", "--gate-min-auc", "0.01", "--gate-max-calibration-error", "9"]
    changes = ["--", "--data.schema", schema, "--loader.batch-size", "64"]
    done = launch(ROOT, "nightly", *night, "--", *gates, "--replicates", "2", *changes)
    assert done.returncode == 0, done.stderr
    store = Store(Path(output))
    assert store.serving() == DAYS[1]

    where = ["--checkpoint", str(store.checkpoint(DAYS[1])), "--data", data, "-j", "1x2"]
    done = launch(ROOT, "evaluate", *where, "--", "--days", DAYS[1])
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if '"world_size"' in line]
    metrics = json.loads(line[line.index("{") :])
    assert (metrics["world_size"], metrics["rows"]) == (2, 600)
