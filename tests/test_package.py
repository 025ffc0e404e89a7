# SPDX-License-Identifier: MIT
"""The installed package: complete, with every dependency declared, and a command that starts."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
DECLARED = {
    canonicalize_name(one.name): one for one in map(Requirement, PROJECT["project"]["dependencies"])
}
# Run by the packages that they are for, in environments of their own.
ELSEWHERE = ("deploy/airflow_dags", "deploy/dagster_jobs")


def pins(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.parametrize(
    ("name", "below"),
    [("cpu", ()), ("gpu", ()), ("serve", ("cpu",)), ("serve", ("gpu",)), ("sweep", ("cpu",))],
)
def test_a_list_names_everything_that_its_packages_need(name: str, below: tuple[str, ...]) -> None:
    """The lists are installed without dependencies, so what they leave out fails at an import."""
    own, missing = pins(name), set()
    held = {*own, *(pin for one in below for pin in pins(one))}
    for package in own:
        try:
            needed = [Requirement(one) for one in metadata.requires(package) or ()]
        except metadata.PackageNotFoundError:
            continue  # of a GPU
        needed = [one for one in needed if not one.marker or one.marker.evaluate({"extra": ""})]
        missing |= {(package, canonicalize_name(one.name)) for one in needed} - {
            (package, one) for one in held
        }
    # The CPU's build of it has another name.
    assert missing <= {("torchrec", "fbgemm-gpu")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    words = ["-m", "pip", "install", "--no-deps", "--no-index", "--no-compile"]
    command = [sys.executable, *words, "--quiet", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_a_wheel_holds_every_module_and_every_file_that_one_reads(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    words = ["git", "ls-files", *(f"{package}/*" for package in PACKAGES)]
    listing = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    missing = {path for path in listing.splitlines() if (ROOT / path).is_file()} - held
    assert not missing
    assert {"trainer/config/names.json", "pipelines/reporting/templates/report.html.j2"} <= held
    assert not [path for path in held if path.startswith(("tests/", "docs/"))]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help"], "usage: fullrank COMMAND"),
        (["doctor", "--help"], "usage: fullrank doctor"),
        (["train", "--help"], "usage: fullrank train RECIPE"),
        (["train", "--list"], "dlrm.demo "),
        (["report", "--help"], "usage: fullrank report"),
    ],
)
def test_the_installed_command_starts_in_an_empty_folder(
    installed: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    command = [str(installed / "bin" / "fullrank"), *words]
    # Only the installed code is on the path: the checkout is not.
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def imported() -> dict[str, str]:
    """Packages of others that our modules import, each with a module that does."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            place = str(path.relative_to(ROOT))
            if place.startswith(ELSEWHERE):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names = [node.module]
                found |= {name.split(".")[0]: place for name in names}
    return {
        name: place
        for name, place in found.items()
        if name not in sys.stdlib_module_names and name not in PACKAGES
    }


def test_every_package_that_is_imported_is_a_declared_dependency() -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    optional = {canonicalize_name(Requirement(one).name) for names in extras for one in names}
    names = {"yaml": "pyyaml", "mlflow": "mlflow-skinny"}  # others are installed as imported
    undeclared = {
        f"{name} ({place})"
        for name, place in imported().items()
        if canonicalize_name(names.get(name, name)) not in {*DECLARED, *optional}
    }
    assert not undeclared


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_pinned_lists_satisfy_what_is_declared(platform: str) -> None:
    pinned = pins(platform)
    if platform == "cpu":
        pinned["fbgemm-gpu"] = pinned["fbgemm-gpu-cpu"]
    assert not DECLARED.keys() - pinned.keys()
    wrong = {
        f"{one} with {pinned[name]}"
        for name, one in DECLARED.items()
        if not one.specifier.contains(pinned[name])
    }
    assert not wrong


def test_torch_torchrec_and_fbgemm_are_held_to_one_release() -> None:
    # Else a plain installation takes the newest of each, which no test has seen together.
    for name in ("torch", "torchrec", "fbgemm-gpu"):
        (major, minor) = pins("gpu")[name].split(".")[:2]
        assert not DECLARED[name].specifier.contains(f"{major}.{int(minor) + 1}.0")
        assert not DECLARED[name].specifier.contains(f"{major}.{int(minor) - 1}.0")
