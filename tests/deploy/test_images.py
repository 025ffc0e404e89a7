# SPDX-License-Identifier: MIT
"""The images and the compose file: pinned, without root or secrets, and of commands that exist."""

import fnmatch
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from pipelines.run import _parser as pipelines_parser

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker" / "compose.yaml"


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_images_are_built_from_the_pinned_list_and_do_not_run_as_root(platform: str) -> None:
    text = (ROOT / "docker" / f"Dockerfile.{platform}").read_text(encoding="utf-8")
    instructions = [line for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    assert instructions[0].startswith("FROM ")
    assert ":" in instructions[0], "the base must have a tag"
    assert f"COPY requirements/{platform}.txt /tmp/list.txt" in instructions
    assert text.count("pip install") == text.count("pip install --no-deps")
    assert "USER fullrank" in instructions
    assert "PYTHONPATH=/workspace" in text
    assert not re.search(r"(?i)password|secret|token", text)


def test_compose_starts_two_nodes_of_one_job() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))
    services = compose["services"]
    nodes = {name: service for name, service in services.items() if "profiles" not in service}
    assert list(nodes) == ["node-0", "node-1"]
    commands = [node["command"] for node in nodes.values()]
    assert commands[0] == commands[1]
    cut = commands[0].index("trainer.train") - 1
    launcher, trainer = commands[0][:cut], commands[0][cut:]
    assert launcher[:3] == ["python", "-m", "torch.distributed.run"]
    assert {"--nnodes=2", "--rdzv-id=fullrank", "--rdzv-endpoint=node-0:29500"} <= set(launcher)
    assert trainer[:2] == ["-m", "trainer.train"]
    for service, node in nodes.items():
        assert node["hostname"] == service
        assert not node["user"].startswith(("0", "root"))
        assert node["networks"] == ["job"]
        assert "ports" not in node
        assert (ROOT / "docker" / node["build"]["context"] / node["build"]["dockerfile"]).exists()
    assert compose["networks"]["job"]["internal"] is True


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_images_keep_no_caches_and_name_what_they_run(platform: str) -> None:
    text = (ROOT / "docker" / f"Dockerfile.{platform}").read_text(encoding="utf-8")
    joined = text.replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if re.match(r"[A-Z]+ ", line)]
    kinds = [line.split()[0] for line in lines]
    assert not {"ADD", "VOLUME", "MAINTAINER"} & set(kinds)
    assert not re.search(r":latest\b", lines[0])
    for line in lines:
        if "apt-get install" in line:
            assert "--no-install-recommends" in line and "rm -rf /var/lib/apt/lists/*" in line
        if "pip install" in line:
            assert "PIP_NO_CACHE_DIR=1" in line and "set -eu" in line
    # What changes most often comes last, and nobody becomes root again after it.
    last = max(number for number, line in enumerate(lines) if line.startswith("COPY"))
    assert lines[last].endswith("--chown=fullrank:fullrank . .")
    assert kinds[last + 1 :] == ["USER", "ENV", "CMD"]
    assert lines[-1] == 'CMD ["python", "-m", "trainer.doctor"]'


@pytest.mark.parametrize(
    "path", [".git", ".venv", "runs", "logs", "data", "raw", "nights", "dist", ".env", ".env.local"]
)
def test_what_is_no_code_does_not_get_into_an_image(path: str) -> None:
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def test_compose_runs_a_night_only_when_asked_to() -> None:
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    night = services["nightly"]
    assert night["profiles"] == ["nightly"]
    assert night["command"][:4] == ["python", "-m", "pipelines.run", "nightly"]
    words = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in night["command"][3:]]
    options = pipelines_parser().parse_args(words)
    assert (options.date, options.data, str(options.output)) == ("new", "logs", "runs/nights")
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "../logs:/workspace/logs:ro" in service["volumes"]
        assert set(service["environment"]) == {"OMP_NUM_THREADS", "HOME"}


def test_the_client_accepts_the_compose_file() -> None:
    docker = shutil.which("docker")
    words = [docker or "docker", "compose", "-f", str(COMPOSE)]
    if not docker or subprocess.run([*words[:2], "version"], capture_output=True).returncode:
        pytest.skip("no docker client with compose")
    words += ["--profile", "nightly", "config", "--quiet"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
