# SPDX-License-Identifier: MIT
"""Every command of the how-tos and the README is one that its program takes; their code runs."""

import contextlib
import importlib
import io
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from embeddings.schema import load_schema
from trainer.config import load_recipe
from trainer.settings import setting_names

ROOT = Path(__file__).resolve().parents[1]
HOWTOS = sorted((ROOT / "docs" / "howto").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", *HOWTOS]
# What is no program of ours; torchx and Slurm are in tests/deploy.
FOREIGN = (
    "git",
    "cd",
    "make",
    "source",
    "kubectl",
    "sbatch",
    "torchx",
    "PIP_EXTRA_INDEX_URL=<that",
)


def blocks(path: Path, kind: str) -> list[str]:
    """The fenced blocks of a kind, without their indentation in a list."""
    found = re.findall(rf"^( *)```{kind}\n(.*?)^ *```", path.read_text("utf-8"), re.DOTALL | re.M)
    return [re.sub(rf"^{indent}", "", text, flags=re.M) for indent, text in found]


def commands(path: Path) -> list[list[str]]:
    lines = [
        line for text in blocks(path, "bash") for line in text.replace("\\\n", " ").splitlines()
    ]
    return [shlex.split(line) for line in lines if line.strip() and not line.startswith("#")]


def help_of(module: str, words: list[str], monkeypatch) -> str:
    monkeypatch.setattr(sys, "argv", [module, *words, "--help"])
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        importlib.import_module(module).main()
    return out.getvalue()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_every_command_is_one_that_its_program_takes(path, monkeypatch):
    for words in commands(path):
        if words[0] in FOREIGN:
            continue
        assert words[0] in ("python", "torchrun"), words
        module, rest = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
        given = [word.partition("=")[0] for word in rest if word.startswith("--")]
        if module == "trainer.train" and not rest[0].startswith("-"):
            known = {"--output", "--help", "--help-all", *setting_names(load_recipe(rest[0]))}
            assert set(given) <= known, words
            continue
        text = help_of(module, [rest[0]] if module == "pipelines.run" else [], monkeypatch)
        missing = [name for name in given if not re.search(rf"{name}\b", text)]
        assert not missing, f"{words}: {missing} not in the help of {module}"


@pytest.mark.parametrize("path", HOWTOS, ids=lambda path: path.stem)
def test_schemas_load_and_code_runs(path, tmp_path, monkeypatch):
    for text in blocks(path, "yaml"):
        (tmp_path / "schema.yaml").write_text(text)
        load_schema(tmp_path / "schema.yaml")
    for text in blocks(path, "python"):
        module = ModuleType("models.baselines.mean")
        monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look
        exec(compile(text, str(path), "exec"), module.__dict__)
        tower = module.__dict__["MeanConfig"]().build(3, 8)
        assert tower(torch.zeros(2, 3, 8)).shape == (2, tower.output_dim)


def test_how_tos_are_listed_in_the_readme_and_their_links_lead_somewhere():
    readme = (ROOT / "README.md").read_text("utf-8")
    for path in HOWTOS:
        assert f"docs/howto/{path.name}" in readme
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text("utf-8")):
            assert path.parent.joinpath(link).exists(), link
