# SPDX-License-Identifier: MIT
"""The launch component: what it asks of each scheduler, and that two local nodes meet."""

import contextlib
import io
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torchx.cli.argparse_util import torchxconfig_run
from torchx.cli.main import main as torchx
from torchx.specs import macros
from torchx.specs.finder import ComponentValidationException, get_component

from deploy.components import free_port, parse_topology, train

ROOT = Path(__file__).resolve().parents[2]
COMPONENT = f"{ROOT / 'deploy' / 'components.py'}:train"
LAUNCH = [sys.executable, "-m", "torchx.cli.main", "run"]


def dry_run(scheduler: str, *words: str) -> str:
    out = io.StringIO()
    torchxconfig_run.called_args.clear()  # torchx keeps the options it has seen on the class
    with contextlib.redirect_stdout(out), contextlib.chdir(ROOT):  # .torchxconfig is read from here
        torchx(["run", "--dryrun", "--workspace", "", "-s", scheduler, COMPONENT, *words])
    return out.getvalue()


def node_line(*overrides: str, recipe: str = "specformer.demo", **settings: Any) -> str:
    """The bash line of node 0 as a scheduler runs it: with torchx's macros filled in."""
    (role,) = train(*overrides, recipe=recipe, **settings).roles
    assert (role.entrypoint, role.args[0]) == ("bash", "-c")
    values = macros.Values(img_root="", app_id="job-1", replica_id="0", rank0_env="NODE0")
    return values.apply(role).args[1]


def test_torchx_accepts_the_component_as_written() -> None:
    assert get_component(COMPONENT).validation_errors == []


@pytest.mark.parametrize(
    ("j", "topology"), [("1x1", (1, 1, 1)), ("2x1", (2, 2, 1)), ("1:4x8", (1, 4, 8))]
)
def test_topology_is_nodes_by_processes(j: str, topology: tuple[int, int, int]) -> None:
    assert parse_topology(j) == topology


@pytest.mark.parametrize(
    "j", ["", "2", "x2", "2x", "0x1", "1x0", "3:2x1", "0:2x1", "2 x 1", "-1x2"]
)
def test_a_wrong_topology_is_refused_with_the_shape_it_should_have(j: str) -> None:
    with pytest.raises(ComponentValidationException, match=r"-j: expected NODESxPROCESSES.*got"):
        parse_topology(j)


def test_two_by_one_asks_for_two_replicas_of_one_process() -> None:
    (role,) = train(recipe="specformer.demo", j="2x1").roles
    assert role.num_replicas == 2
    assert "--nnodes 2 --nproc-per-node 1" in role.args[1]


def test_an_elastic_job_gives_torchrun_a_range_of_nodes() -> None:
    (role,) = train(recipe="specformer.demo", j="1:4x2").roles
    assert (role.min_replicas, role.num_replicas) == (1, 4)
    assert "--nnodes 1:4 --nproc-per-node 2" in role.args[1]


def test_overrides_reach_the_trainer_word_for_word() -> None:
    words = ["--data.path", "a b", "--note", "it's $HOME ${app_id}; rm *"]
    line = node_line(*words, output="runs/x")
    tail = line.split(" -m trainer.train ")[1]
    assert shlex.split(tail) == ["specformer.demo", "--output", "runs/x", *words]


def test_without_an_output_each_run_gets_a_folder_named_after_recipe_and_time() -> None:
    folder = re.search(r"--output (\S+)", node_line(recipe="acme.recipes:feed"))
    assert folder
    assert re.fullmatch(r"runs/acme\.recipes-feed-\d{8}-\d{6}-\d{3}", folder[1])


def test_cores_of_a_node_are_shared_among_its_processes() -> None:
    assert "${OMP_NUM_THREADS:-4}" in node_line(cpu=8, j="1x2")
    assert "${OMP_NUM_THREADS:-1}" in node_line(cpu=1, j="1x2")
    assert " OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} " in node_line(cpu=8, j="1x2")


def test_gpu_jobs_use_the_gpu_image_unless_told_otherwise() -> None:
    assert train(recipe="r").roles[0].image == "fullrank:cpu"
    assert train(recipe="r", gpu=8).roles[0].image == "fullrank:gpu"
    assert train(recipe="r", gpu=8, image="mine:1").roles[0].image == "mine:1"


def test_retries_go_to_torchrun_and_to_the_scheduler() -> None:
    (role,) = train(recipe="r", max_retries=3).roles
    assert role.max_retries == 3
    assert "--max-restarts 3" in role.args[1]


def test_a_free_port_can_be_bound_and_is_not_the_same_for_two_jobs_at_once() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        assert free_port() != listener.getsockname()[1]


def test_a_named_port_is_kept() -> None:
    assert ":29500" in node_line(j="2x1", port=29500)


def run_node(line: str, folder: Path, **variables: str) -> list[str]:
    """Run a node's line with a `python` that only prints its words; return them."""
    python = folder / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    line = line.replace(sys.executable, "/nowhere/python")
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_node_without_the_submitting_interpreter_uses_the_python_on_its_path(
    tmp_path: Path,
) -> None:
    assert run_node(node_line(), tmp_path)[:2] == ["-m", "torch.distributed.run"]


@pytest.mark.parametrize(
    ("job", "host", "addresses"),
    [
        ("local_cwd://torchx/a", "localhost", ["--local-addr=localhost", "localhost:7"]),
        ("kubernetes://torchx/a", "localhost", ["localhost:7"]),  # node 0 in its own pod
        ("kubernetes://torchx/a", "pod-0.svc", ["pod-0.svc:7"]),
        ("slurm://torchx/1", "node17", ["node17:7"]),
        ("aws://x/1", "", ["localhost:7"]),  # a scheduler that tells node 0 nothing
    ],
)
def test_only_nodes_that_share_a_machine_advertise_loopback(
    tmp_path: Path, job: str, host: str, addresses: list[str]
) -> None:
    words = run_node(node_line(j="2x1", port=7), tmp_path, TORCHX_JOB_ID=job, NODE0=host)
    assert [word for word in words if word.endswith(":7") or "local-addr" in word] == addresses


def test_local_cwd_starts_every_node_on_loopback_with_this_interpreter() -> None:
    request = dry_run("local_cwd", "--recipe", "specformer.demo", "-j", "2x1").split("REQUEST")[1]
    assert request.count("'TORCHX_RANK0_HOST': 'localhost'") == 2
    # The printed request breaks long strings over lines.
    text = re.sub(r"'\s+'", "", request)
    assert text.count(f"python={sys.executable};") == 2
    assert text.count("-m trainer.train specformer.demo --output runs/specformer.demo-") == 2


def test_local_docker_asks_for_two_containers() -> None:
    out = dry_run("local_docker", "--recipe", "specformer.demo", "-j", "2x1", "--memMB", "4096")
    assert out.count("image: fullrank:cpu") == 2
    assert out.count("mem_limit: 4096m") == 2
    assert "privileged: false" in out


def test_slurm_gets_a_script_that_bash_can_parse() -> None:
    out = dry_run("slurm", "--recipe", "toy", "-j", "2x4", "--gpu", "4", "--cpu", "16")
    script = out[out.index("#!/bin/bash") :]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.count("--gpus-per-task=4") == 2
    assert script.count("--cpus-per-task=16") == 2
    assert "SLURM_JOB_NODELIST_HET_GROUP_0" in script


def test_kubernetes_gets_a_job_of_two_pods() -> None:
    pytest.importorskip("kubernetes")
    with pytest.warns(UserWarning, match="Volcano"):  # its retries, says torchx
        out = dry_run("kubernetes", "--recipe", "toy", "-j", "2x1", "--max_retries", "2")
    job = yaml.safe_load(out[out.index("apiVersion:") :])
    assert [task["replicas"] for task in job["spec"]["tasks"]] == [1, 1]
    assert [task["maxRetry"] for task in job["spec"]["tasks"]] == [2, 2]
    assert job["spec"]["queue"] == "default"


def test_a_wrong_topology_ends_the_command_without_a_stack_trace() -> None:
    with pytest.raises(SystemExit) as ending:
        dry_run("local_cwd", "--recipe", "specformer.demo", "-j", "two")
    assert ending.value.code == 1


@pytest.mark.parametrize("document", ["README.md", "deploy/README.md"])
def test_documented_commands_are_accepted(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^\s*torchx run (-s local_cwd .*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        _, scheduler, component, *words = shlex.split(command)
        assert component == "deploy/components.py:train"
        assert "-m trainer.train specformer.demo" in re.sub(
            r"'\s+'", "", dry_run(scheduler, *words)
        )


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


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Launch a stand-in for the trainer; torchx starts local nodes in the current folder."""
    (folder / "trainer").mkdir()
    (folder / "trainer" / "train.py").write_text(TOY)
    command = [*LAUNCH, "-s", "local_cwd", COMPONENT, "--recipe", "toy", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.mark.launch
def test_two_local_nodes_meet_and_both_are_heard(tmp_path: Path) -> None:
    done = launch(tmp_path, "-j", "2x1", "--output", "out", "--", "--data.path", "a b")
    assert done.returncode == 0, done.stderr
    words = ["toy", "--output", "out", "--data.path", "a b"]
    for rank in range(2):
        assert f"rank {rank} sees 2 of {words}" in done.stderr
    assert {line.split()[0] for line in done.stderr.splitlines() if " sees " in line} == {
        "train/0",
        "train/1",
    }


@pytest.mark.launch
def test_the_command_fails_when_one_rank_fails(tmp_path: Path) -> None:
    done = launch(tmp_path, "-j", "2x1", "--", "--fail")
    assert done.returncode == 1, done.stderr
    assert "exitcode  : 3" in done.stderr
