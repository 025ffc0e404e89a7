# SPDX-License-Identifier: MIT
"""The components: what they refuse, and the script that each node runs."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import AppDef, BindMount, VolumeMount, macros
from torchx.specs.file_linter import get_fn_docstring
from torchx.specs.finder import ComponentValidationException, get_component

from deploy.components import (
    SIZES,
    evaluate,
    free_port,
    ingest,
    nightly,
    parse_topology,
    scheduler_of,
    train,
)

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ROOT / "deploy" / "components.py"


def script(app: AppDef, node: int = 0) -> str:
    """A node's bash script as a scheduler runs it: with torchx's macros filled in."""
    (role,) = app.roles
    assert (role.entrypoint, role.args[0]) == ("bash", "-c")
    values = macros.Values(img_root="", app_id="job-1", replica_id=str(node), rank0_env="NODE0")
    return values.apply(role).args[1]


def node_line(*overrides: str, recipe: str = "specformer.demo", **settings: Any) -> str:
    return script(train(*overrides, recipe=recipe, **settings))


@pytest.mark.parametrize("name", ["train", "evaluate", "score", "ingest", "nightly"])
def test_torchx_accepts_each_component_as_written_and_explains_each_flag(name: str) -> None:
    component = get_component(f"{COMPONENTS}:{name}")
    assert component.validation_errors == []
    _, flags = get_fn_docstring(component.fn)
    assert all(len(text) > 10 and "required" not in text for text in flags.values()), flags


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
    assert "${OMP_NUM_THREADS:-4}" in node_line(size="8:0:1024", j="1x2")
    assert "${OMP_NUM_THREADS:-1}" in node_line(size="1:0:1024", j="1x2")
    assert " OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} " in node_line(j="1x2")


def test_gpu_jobs_use_the_gpu_image_unless_told_otherwise() -> None:
    assert train(recipe="r").roles[0].image == "fullrank:cpu"
    assert train(recipe="r", size="gpu8").roles[0].image == "fullrank:gpu"
    assert train(recipe="r", size="gpu8", image="mine:1").roles[0].image == "mine:1"


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


def run_node(line: str, folder: Path, code: int = 0, **variables: str) -> list[str]:
    """Run a node's script with a `python` that only prints its words; return them."""
    python = folder / "python"
    # Of waiting for node 0 it prints no word, but that it was asked for.
    python.write_text(
        '#!/bin/sh\n[ "$2" = deploy.wait ] && { shift; echo "$*"; exit ${WAIT_CODE:-0}; }\n'
        'printf "%s\\n" "$@"\n'
    )
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    line = line.replace(sys.executable, "/nowhere/python")
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
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


WAIT = "deploy.wait pod-0.svc 7 --seconds 60"


def test_every_node_but_the_first_waits_for_node_0_before_it_starts(tmp_path: Path) -> None:
    job = train(recipe="toy", j="3x1", port=7, patience=60)
    there = {"TORCHX_JOB_ID": "kubernetes://torchx/a", "NODE0": "pod-0.svc"}
    assert run_node(script(job, 2), tmp_path, **there)[:3] == [WAIT, "-m", "torch.distributed.run"]
    assert run_node(script(job, 0), tmp_path, **there)[0] == "-m"
    local = {**there, "TORCHX_JOB_ID": "local_cwd://torchx/a"}
    assert run_node(script(job, 2), tmp_path, **local)[0] == "-m"


def test_a_node_that_waited_in_vain_starts_nothing_and_fails(tmp_path: Path) -> None:
    job = train(recipe="toy", j="2x1", port=7, patience=60)
    there = {"TORCHX_JOB_ID": "kubernetes://torchx/a", "NODE0": "pod-0.svc"}
    assert run_node(script(job, 1), tmp_path, code=1, **there, WAIT_CODE="1") == [WAIT]


def test_an_evaluation_runs_on_all_nodes_and_processes() -> None:
    job = evaluate("--days", "2026-01-02", checkpoint="runs/a b", data="logs", j="2x3")
    assert job.roles[0].num_replicas == 2
    words = shlex.split(script(job).split(" -m torch.distributed.run ")[1])
    assert words[words.index("--nproc-per-node") + 1] == "3"
    tail = words[words.index("-m") + 1 :]
    assert tail == ["trainer.evaluate", "runs/a b", "--data", "logs", "--days", "2026-01-02"]


def test_an_ingestion_shares_days_among_processes_and_gets_its_options_word_for_word() -> None:
    job = ingest("--list-separator", "|", raw="raw", schema="s.yaml", output="data", j="2x4")
    assert job.roles[0].num_replicas == 2
    words = shlex.split(script(job).split(" -m torch.distributed.run ")[1])
    assert words[words.index("--nproc-per-node") + 1] == "4"
    tail = words[words.index("-m") + 1 :]
    given = ["--schema", "s.yaml", "--output", "data", "--list-separator", "|"]
    assert tail == ["pipelines.deliveries", "raw", *given]


def test_a_night_is_of_all_new_days_unless_a_date_is_given(tmp_path: Path) -> None:
    job = nightly(recipe="dlrm.demo", raw="raw", output="nights", j="1x2")
    words = run_node(script(job), tmp_path)
    assert words[:3] == ["-m", "pipelines.run", "nightly"]
    assert words[words.index("--date") + 1] == "new"
    assert words[-4:] == ["--raw", "raw", "-j", "1x2"]
    given = {"recipe": "dlrm.demo", "data": "logs", "output": "nights", "date": "2026-01-08"}
    job = nightly("--first-days", "3", "--", "--epochs", "2", **given)
    words = run_node(script(job), tmp_path)
    assert words[words.index("--date") + 1] == "2026-01-08"
    assert words[-5:] == ["--first-days", "3", "--", "--epochs", "2"]


def test_a_night_on_two_nodes_is_refused_with_the_way_to_train_on_two() -> None:
    with pytest.raises(ComponentValidationException, match="--launcher torchx --scheduler"):
        nightly(recipe="dlrm.demo", data="logs", output="nights", j="2x1")


def test_sizes_are_named_or_spelled_out() -> None:
    for name, (cores, gpus, mib) in SIZES.items():
        resource = train(recipe="r", size=name, j="1x2").roles[0].resource
        assert (resource.cpu, resource.gpu, resource.memMB) == (cores or os.cpu_count(), gpus, mib)
    resource = train(recipe="r", size="16:4:65536").roles[0].resource
    assert (resource.cpu, resource.gpu, resource.memMB) == (16, 4, 65536)
    for size in ("huge", "", "4", "4:1", "4:1:0", "-4:1:100"):
        with pytest.raises(ComponentValidationException, match=r"--size: expected local.* got"):
            train(recipe="r", size=size)


@pytest.mark.parametrize(
    ("command", "scheduler"),
    [
        ("torchx run -s slurm deploy/components.py:train --recipe r -s x", "slurm"),
        ("torchx run --scheduler kubernetes -cfg queue=a deploy/components.py:train", "kubernetes"),
        ("torchx run --scheduler=slurm --dryrun deploy/components.py:train", "slurm"),
        ("torchx run deploy/components.py:train --recipe r -s slurm", "local"),
        ("torchx run -s", "local"),
        ("python -m pytest", "local"),
    ],
)
def test_the_scheduler_is_what_torchx_was_told(command: str, scheduler: str) -> None:
    assert scheduler_of(command.split()) == scheduler


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes", "aws_batch"])
def test_the_size_of_this_machine_is_refused_for_nodes_elsewhere(
    scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["torchx", "run", "-s", scheduler, "deploy/components.py:train"]
    monkeypatch.setattr(sys, "argv", words)
    for size in ({}, {"size": "local"}):
        with pytest.raises(ComponentValidationException, match=f"a node of {scheduler} may not"):
            train(recipe="r", j="4x8", **size)
    assert train(recipe="r", j="4x8", size="gpu8").roles[0].resource.gpu == 8
    monkeypatch.setattr(sys, "argv", ["torchx", "run", "-s", "local_docker", words[-1]])
    assert train(recipe="r").roles[0].resource.cpu == os.cpu_count()


def visible(folder: Path, topology: str, node: int, gpus: str, **variables: str) -> tuple[str, str]:
    """What a node of this machine lets its processes see of its GPUs, and its notes."""
    for name, text in {
        "nvidia-smi": f"printf '{gpus}'",
        "python": 'echo "gpus=${CUDA_VISIBLE_DEVICES-all}"',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    line = script(train(recipe="toy", j=topology), node).replace(sys.executable, "/nowhere/python")
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "TORCHX_JOB_ID": "local_cwd://torchx/a"}
    environment = {**kept, **path, **variables}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().removeprefix("gpus="), done.stderr


@pytest.mark.parametrize(
    ("topology", "gpus", "variables", "expected"),
    [
        ("2x1", "0\\n1\\n", {}, ["0", "1"]),
        ("2x2", "0\\n1\\n2\\n3\\n4\\n", {}, ["0,1", "2,3"]),
        ("1:2x2", "0\\n1\\n2\\n3\\n", {}, ["0,1", "2,3"]),
        ("2x1", "0\\n1\\n2\\n3\\n", {"CUDA_VISIBLE_DEVICES": "3,GPU-a"}, ["3", "GPU-a"]),
        ("2x1", "0\\n1\\n", {"CUDA_VISIBLE_DEVICES": ""}, ["", ""]),
        ("2x1", "", {}, ["all", "all"]),  # a machine without
        ("1x2", "0\\n1\\n", {}, ["all"]),  # one node has the whole machine
        ("2x1", "0\\n1\\n", {"TORCHX_JOB_ID": "slurm://torchx/1"}, ["all"]),
    ],
)
def test_nodes_of_one_machine_share_out_its_gpus(
    tmp_path: Path, topology: str, gpus: str, variables: dict[str, str], expected: list[str]
) -> None:
    for node, own in enumerate(expected):
        assert visible(tmp_path, topology, node, gpus, **variables) == (own, "")


def test_too_few_gpus_for_the_nodes_of_one_machine_are_left_alone_with_a_note(
    tmp_path: Path,
) -> None:
    found = [visible(tmp_path, "2x2", node, "0\\n1\\n2\\n") for node in range(2)]
    assert [own for own, _ in found] == ["", ""]
    assert found[0][1].splitlines() == [
        "note: 4 processes, but 3 GPUs: all run on the CPU; -j 1x3 uses the GPUs"
    ]
    assert found[1][1] == ""


def test_mounts_are_torchx_mounts() -> None:
    mounts = "type=bind,src=/data/logs,dst=/workspace/logs,readonly,type=volume,src=runs,dst=/runs"
    bind, volume = train(recipe="r", mounts=mounts).roles[0].mounts
    assert isinstance(bind, BindMount) and bind.read_only and bind.src_path == "/data/logs"
    assert isinstance(volume, VolumeMount) and volume.src == "runs" and not volume.read_only
    for wrong in ("/data:/workspace", "type=disk,src=a,dst=b", "type=bind,src=/a"):
        with pytest.raises(ComponentValidationException, match="--mounts: expected type=bind"):
            train(recipe="r", mounts=wrong)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 70_000}, "--port: expected 0 to 65535, got 70000"),
        ({"port": -1}, "--port: expected 0 to 65535, got -1"),
        ({"max_retries": -1}, "--max_retries: expected 0 to 999, got -1"),
        ({"j": "99999999x1"}, "-j: expected NODESxPROCESSES"),
        ({"j": "\u0661x\u0661"}, "-j: expected NODESxPROCESSES"),
        ({"size": "99999999999999999999:0:1"}, "--size: expected local"),
    ],
)
def test_numbers_that_no_machine_has_are_refused_before_the_launch(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ComponentValidationException, match=message):
        train(recipe="r", **settings)


@pytest.mark.parametrize("recipe", ["", "\u0440:\u0440", "--"])
def test_a_recipe_of_no_letters_that_a_job_may_have_still_gives_it_a_name(recipe: str) -> None:
    assert train(recipe=recipe, output="runs/a").name == "train"


def test_a_launch_from_another_folder_is_refused_before_it_ships_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ComponentValidationException, match=f"got {re.escape(str(tmp_path))}. Ch"):
        train(recipe="r")
    (tmp_path / ".torchxconfig").touch()  # of another project
    with pytest.raises(ComponentValidationException, match=r"Expected the checkout"):
        ingest(raw="raw", schema="s.yaml", output="data")
    (tmp_path / "trainer").mkdir()
    assert train(recipe="r").roles
