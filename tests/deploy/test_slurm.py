# SPDX-License-Identifier: MIT
"""Real Slurm jobs on two nodes of this machine: the scripts of deploy/slurm/, and torchx's."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import runs
from tests.support.slurm import NODES, Slurm, missing, slurm

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "deploy" / "slurm"
# The agents of torchrun have met when this starts; it needs no torch to say so.
TOY = """
import os, sys
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {sys.argv[1:]}", flush=True)
"""
needs_slurm = pytest.mark.skipif(
    bool(missing()),
    reason=f"{missing()} is not installed: apt-get install slurm-wlm munge",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def run_script(
    name: str, folder: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as the batch host does, with programs that only print what they are given."""
    said = '#!/bin/sh\nprintf "%s|" "$(basename $0)" "$@" "threads=$OMP_NUM_THREADS"\n'
    for place in ("srun", "scontrol", ".venv/bin/python"):
        program = folder / place
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\necho node17\n" if place == "scontrol" else said)
        program.chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[17-18]", "SLURM_JOB_NUM_NODES": "2"}
    environment = {"PATH": f"{folder}:/usr/bin:/bin", **job, **variables}
    return subprocess.run(
        ["bash", str(SCRIPTS / name), *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [("train.sbatch", ["dlrm.demo"]), ("nightly.sbatch", ["dlrm.demo", "data", "nights"])],
)
@pytest.mark.parametrize(
    "given", [{"SLURM_CPUS_ON_NODE": "1"}, {"SLURM_CPUS_PER_TASK": "4", "SLURM_CPUS_ON_NODE": "64"}]
)
def test_fewer_cores_than_processes_are_refused_with_the_option_that_asks_for_more(
    tmp_path: Path, name: str, words: list[str], given: dict[str, str]
) -> None:
    done = run_script(name, tmp_path, *words, PROCESSES="8", **given)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--cpus-per-task=8" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_training_gives_its_processes_all_cores_of_a_task(tmp_path: Path) -> None:
    words = ["dlrm.demo", "--epochs", "2"]
    cores = {"SLURM_CPUS_PER_TASK": "96", "SLURM_CPUS_ON_NODE": "128"}
    done = run_script("train.sbatch", tmp_path, *words, PROCESSES="8", **cores)
    assert done.returncode == 0, done.stderr
    said = done.stdout.split("|")
    assert said[0] == "srun" and "--cpus-per-task=96" in said and "threads=12" in said
    assert said[said.index("--nproc-per-node") + 1] == "8"
    assert said[-5:-2] == ["runs/dlrm.demo-7", "--epochs", "2"]


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.sbatch")), ids=lambda path: path.name)
def test_each_example_of_a_script_asks_for_cores_and_memory(path: Path) -> None:
    examples = [line for line in path.read_text().splitlines() if re.match(r"#.*\bsbatch --", line)]
    assert examples
    for line in examples:
        processes = int((re.findall(r"PROCESSES=(\d+)", line) or [1])[0])
        (cores,) = map(int, re.findall(r"--cpus-per-task=(\d+)", line))
        assert cores >= processes and "--mem=" in line


@needs_slurm
@pytest.mark.launch
def test_a_training_runs_on_two_nodes_and_leaves_its_checkpoint(
    cluster: Slurm, tmp_path: Path
) -> None:
    for name in (".venv", "embeddings", "models", "trainer"):
        (tmp_path / name).symlink_to(ROOT / name)
    logs = runs.generate(tmp_path / "logs", rows_per_day=320)
    words = ["dlrm.demo", "--data.path", str(logs), "--data.train-days", runs.DAYS[0]]
    words += ["--data.test-days", runs.DAYS[1], "--loader.batch-size", "64", "--epochs", "1"]
    state = cluster.run(SCRIPTS / "train.sbatch", *words, options=["--nodes=2"], cwd=tmp_path)
    (log,) = tmp_path.glob("slurm-*.out")
    assert state == "COMPLETED", log.read_text()
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name == f"dlrm.demo-{log.stem.partition('-')[2]}"
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["world_size"] == len(NODES)
    assert list(run.glob("checkpoints/step-*/manifest.json"))


@needs_slurm
@pytest.mark.launch
def test_a_wrong_recipe_fails_the_job(cluster: Slurm, tmp_path: Path) -> None:
    state = cluster.run(SCRIPTS / "train.sbatch", options=["--nodes=2"], cwd=tmp_path)
    (log,) = tmp_path.glob("slurm-*.out")
    assert state == "FAILED"
    assert "usage: sbatch --nodes=N" in log.read_text()


@needs_slurm
@pytest.mark.launch
def test_a_night_runs_on_one_node_by_its_date(cluster: Slurm, tmp_path: Path) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s|" "$@"; echo "$SLURM_JOB_NUM_NODES"\n')
    python.chmod(0o755)
    script, words = SCRIPTS / "nightly.sbatch", ["dlrm.demo", "data", "nights"]
    state = cluster.run(script, *words, "--first-days", "3", cwd=tmp_path)
    (log,) = tmp_path.glob("slurm-*.out")
    assert state == "COMPLETED", log.read_text()
    said = log.read_text().strip().split("|")
    assert said[:4] == ["-m", "pipelines.run", "nightly", "--date"]
    assert said[4] == "new"
    given = ["--recipe", "dlrm.demo", "--data", "data", "--output", "nights", "-j", "1x1"]
    assert said[5:] == [*given, "--first-days", "3", "1"]


@needs_slurm
@pytest.mark.launch
def test_torchx_starts_two_nodes_under_slurm(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / ".torchxconfig").touch()
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").touch()  # before an installed package of that name
    (tmp_path / "trainer" / "train.py").write_text(TOY)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    # After it has submitted, torchx asks Slurm's accounting, which needs a database.
    sacct = tmp_path / "sacct"
    sacct.write_text("#!/bin/sh\nexit 0\n")
    sacct.chmod(0o755)
    environment = {**cluster.environment, "PATH": f"{tmp_path}:{cluster.environment['PATH']}"}
    words = ["-s", "slurm", "deploy/components.py:train", "--recipe", "toy", "-j", "2x1"]
    command = [sys.executable, "-m", "torchx.cli.main", "run", *words, "--size", "1:0:512"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (number,) = re.findall(r"^slurm://torchx/(\d+)$", done.stdout, re.MULTILINE)
    state = cluster.state(number)
    said = "".join(path.read_text() for path in sorted(tmp_path.glob(f"slurm-{number}-train-*")))
    assert state == "COMPLETED", said
    for rank in range(2):
        assert f"rank {rank} of 2: ['toy', '--output', 'runs/toy-" in said
