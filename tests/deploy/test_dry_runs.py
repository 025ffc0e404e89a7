# SPDX-License-Identifier: MIT
"""What each scheduler is asked for by each component, and that documented commands are accepted."""

import contextlib
import importlib.util
import io
import itertools
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from torchx.cli.argparse_util import ArgOnceAction, torchxconfig_run
from torchx.cli.main import main as torchx

from tests.support.manifests import check, templates

ROOT = Path(__file__).resolve().parents[2]
WORDS = {
    "train": "--recipe specformer.demo -j 2x1 -- --data.path logs",
    "evaluate": "--checkpoint runs/mine --data logs -j 2x1 -- --days 2026-01-08",
    "score": "--checkpoint runs/mine --data logs --output scores -j 2x1 -- --days 2026-01-08",
    "ingest": "--raw raw --schema schema.yaml --output data -j 1x2 -- --ready files",
    "nightly": "--recipe dlrm.demo --data logs --output nights --date 2026-01-08 -- --first-days 3",
}
COMMANDS = {
    "train": "-m trainer.train specformer.demo --output runs/specformer.demo-",
    "evaluate": "-m trainer.evaluate runs/mine --data logs --days 2026-01-08",
    "score": "-m trainer.score runs/mine --data logs --output scores --days 2026-01-08",
    "ingest": "-m pipelines.deliveries raw --schema schema.yaml --output data --ready files",
    "nightly": "-m pipelines.run nightly --date 2026-01-08 --recipe dlrm.demo --output nights "
    "--data logs -j 1x1 --first-days 3",
}
NODES = {"train": 2, "evaluate": 2, "score": 2, "ingest": 1, "nightly": 1}
each_component = pytest.mark.parametrize("component", list(WORDS))


def dry_run(scheduler: str, component: str, *words: str, options: Sequence[str] = ()) -> str:
    """Return what a scheduler would be asked for, as torchx prints it."""
    out = io.StringIO()
    for action in (torchxconfig_run, ArgOnceAction):  # they keep the options they have seen
        action.called_args.clear()
    file = f"{ROOT / 'deploy' / 'components.py'}:{component}"
    with contextlib.redirect_stdout(out), contextlib.chdir(ROOT):  # .torchxconfig is read from here
        torchx(["run", "--dryrun", "--workspace", "", "-s", scheduler, *options, file, *words])
    return out.getvalue().split("=== SCHEDULER REQUEST ===")[1]


def scripts(request: str) -> list[str]:
    """The nodes' scripts in a printed request, each string of which is broken over lines."""
    text = re.sub(r"(['\"])\n\s+(['\"])", "", request)
    return re.findall(r"# The interpreter that submits.*?exec [^\n]*", text, re.DOTALL)


@each_component
def test_local_cwd_starts_the_nodes_with_this_interpreter(component: str) -> None:
    request = dry_run("local_cwd", component, *shlex.split(WORDS[component]))
    assert request.count("'TORCHX_RANK0_HOST': 'localhost'") == NODES[component]
    found = scripts(request)
    assert len(found) == NODES[component]
    for script in found:
        assert f"python={sys.executable}\\n" in script
        assert COMMANDS[component] in script.replace('\\"', '"').replace("\\'", "'")


@each_component
def test_local_docker_asks_for_a_container_per_node(component: str) -> None:
    mounts = "type=bind,src=/data/logs,dst=/workspace/logs,readonly"
    flags = ["--size", "1:0:4096", "--mounts", mounts]
    request = dry_run("local_docker", component, *flags, *shlex.split(WORDS[component]))
    containers = yaml.safe_load(re.sub(r"!!python/\S+", "", request))
    assert len(containers) == NODES[component]
    for container in containers:
        assert container["image"] == "fullrank:cpu"
        assert container["kwargs"]["mem_limit"] == "4096m"
        assert container["kwargs"]["privileged"] is False
        assert container["kwargs"]["mounts"][0]["dictitems"]["ReadOnly"] is True
        assert COMMANDS[component] in container["command"][-1]


@each_component
def test_slurm_gets_a_script_that_bash_can_parse(component: str) -> None:
    flags = ["--size", "16:0:65536"] if component == "ingest" else ["--size", "16:4:65536"]
    request = dry_run("slurm", component, *flags, *shlex.split(WORDS[component]))
    script = request[request.index("#!/bin/bash") :]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.count("--cpus-per-task=16") == NODES[component]
    assert script.count("--gpus-per-task=4") == (0 if component == "ingest" else NODES[component])
    assert ("SLURM_JOB_NODELIST_HET_GROUP_0" in script) == (NODES[component] > 1)


@each_component
def test_kubernetes_gets_a_volcano_job_of_valid_pods(component: str) -> None:
    mounts = "type=volume,src=fullrank-runs,dst=/workspace/runs"
    flags = ["--max_retries", "2"] if component in ("train", "nightly") else []
    with warnings.catch_warnings(record=True):  # Volcano's retries, says torchx
        warnings.simplefilter("always")
        request = dry_run(
            "kubernetes", component, *flags, "--mounts", mounts, *shlex.split(WORDS[component])
        )
    job = yaml.safe_load(request)
    assert job["spec"]["queue"] == "default"  # from .torchxconfig
    assert [task["replicas"] for task in job["spec"]["tasks"]] == [1] * NODES[component]
    for task in job["spec"]["tasks"]:
        assert task.get("maxRetry") == (2 if flags else None)
    check(job, "1.37")
    for pod in templates(job):
        (container,) = pod["spec"]["containers"]
        assert COMMANDS[component] in container["command"][-1]
        assert container["volumeMounts"][-1]["mountPath"] == "/workspace/runs"


def test_a_wrong_topology_ends_the_command_without_a_stack_trace() -> None:
    with pytest.raises(SystemExit) as ending:
        dry_run("local_cwd", "train", "--recipe", "specformer.demo", "-j", "two")
    assert ending.value.code == 1


@pytest.mark.parametrize(
    "document",
    ["README.md", "deploy/README.md", "docs/howto/nodes.md", "docs/howto/kubernetes.md"],
)
def test_documented_launches_are_accepted(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^\s*torchx run (.*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        words = shlex.split(command)
        file = next(word for word in words if ":" in word)
        before, after = words[: words.index(file)], words[words.index(file) + 1 :]
        assert before[0] == "-s" and file.startswith("deploy/components.py:"), command
        component = file.partition(":")[2]
        request = dry_run(before[1], component, *after, options=before[2:])
        assert COMMANDS[component].split()[1] in request


def test_other_documented_commands_name_files_and_services_that_exist() -> None:
    text = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [
        line
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        for line in block.split("\n")
    ]
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    seen = set()
    for line in filter(None, lines):
        words = shlex.split(line)
        seen.add(words[0])
        files = [
            after for word, after in itertools.pairwise(words) if word in ("-f", "--config.file")
        ]
        files += [word for word in words if word.endswith(".sbatch")]
        assert all((ROOT / file).is_file() for file in files), line
        assert words[0] in ("torchx", "source", "python", "apt-get") or files, line
        if "run" in words and words[0] == "docker":
            assert words[-1] in services, line
        if words[0] == "python":
            assert importlib.util.find_spec(words[words.index("-m") + 1]), line
    assert {"torchx", "docker", "sbatch", "kubectl", "python"} <= seen
