# SPDX-License-Identifier: MIT
"""Every command of the documents is one that its program takes; their code and schemas run."""

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

from embeddings.schema.schema import load_schema
from pipelines.cli import COMMANDS
from trainer.config.overrides import setting_names
from trainer.recipes.load import load_recipe

ROOT = Path(__file__).resolve().parents[1]
HOWTOS = sorted((ROOT / "docs" / "howto").glob("*.md"))
PAGES = sorted((ROOT / "docs").glob("*.md"))
RUNBOOK = ROOT / "deploy" / "RUNBOOK.md"
DOCUMENTS = [ROOT / "README.md", RUNBOOK, *PAGES, *HOWTOS]
# Programs whose first word is a command of its own.
GROUPS = ("pipelines.run", "pipelines.abtest")
# What is no program of ours; torchx and Slurm are in tests/deploy.
FOREIGN = (
    *("git", "cd", "make", "source", "kubectl", "sbatch", "torchx", "PIP_EXTRA_INDEX_URL=<that"),
    *(
        "apt-get",
        "prometheus",
        "curl",
        "df",
        "dmesg",
        "grep",
        "head",
        "iostat",
        "ls",
        "nproc",
        "ps",
        "py-spy",
        "rm",
        "tail",
    ),
)


def blocks(path: Path, kind: str) -> list[str]:
    """The fenced blocks of a kind, without their indentation in a list."""
    found = re.findall(rf"^( *)```{kind}\n(.*?)^ *```", path.read_text("utf-8"), re.DOTALL | re.M)
    return [re.sub(rf"^{indent}", "", text, flags=re.M) for indent, text in found]


def commands(path: Path) -> list[list[str]]:
    """The commands of the blocks and those within sentences, each as its words."""
    text = path.read_text("utf-8")
    lines = [
        line for block in blocks(path, "bash") for line in block.replace("\\\n", " ").splitlines()
    ]
    inline = r"`((?:python -m|torchrun|fullrank) [^`]+)`"
    lines += re.findall(inline, re.sub(r"\s*\n\s*|\\\|", " ", text))
    found: list[list[str]] = [[]]
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|;")
        lexer.whitespace_split, lexer.commenters = True, "#"
        for word in lexer:
            found[-1] += [word] if word not in ("|", ";") else []
            found += [[]] if word in ("|", ";") else []
        found.append([])
    return [words for words in found if words]


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
        if words[0] == "fullrank":
            if words[1] == "COMMAND" or words[1].startswith("--"):
                continue
            command = COMMANDS[words[1]]
            module, rest = command.module, [*command.words, *words[2:]]
        else:
            assert words[0] in ("python", "torchrun"), words
            module, rest = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
            if module in ("MODULE", "pip"):
                continue
        # A quoted word may hold a setting and its value.
        given = [re.split(r"[= ]", word.strip("[]"))[0] for word in rest if "--" in word[:3]]
        if module == "trainer.train" and rest and not rest[0].startswith("-"):
            recipe = rest[0] if "." in rest[0] else "dlrm.demo"  # NAME stands for any
            known = {"--output", "--help", "--help-all", "--section.field"}
            assert set(given) <= {*known, *setting_names(load_recipe(recipe))}, words
            continue
        text = help_of(module, rest[:1] if module in GROUPS else [], monkeypatch)
        passed_on = set(setting_names(load_recipe("dlrm.demo")))
        missing = [name for name in given if not re.search(rf"{name}\b", text)]
        missing = [name for name in missing if "." not in name or name not in passed_on]
        assert not missing, f"{words}: {missing} not in the help of {module}"


@pytest.mark.parametrize("path", [*PAGES, *HOWTOS], ids=lambda path: path.stem)
def test_schemas_load_and_code_runs(path, tmp_path, monkeypatch):
    for text in blocks(path, "yaml"):
        (tmp_path / "schema.yaml").write_text(text)
        load_schema(tmp_path / "schema.yaml")
    for text in blocks(path, "python"):
        module = ModuleType("models.baselines.fields.mean")
        monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look
        code = compile(text, str(path), "exec")
        if "MeanConfig" not in text:  # runs where it has a model (tests/trainer/serving)
            continue
        exec(code, module.__dict__)
        tower = module.__dict__["MeanConfig"]().build(3, 8)
        assert tower(torch.zeros(2, 3, 8)).shape == (2, tower.output_dim)


def test_every_page_is_listed_in_the_readme():
    readme = (ROOT / "README.md").read_text("utf-8")
    for path in (*PAGES, *HOWTOS):
        assert f"({path.relative_to(ROOT)})" in readme, path.name


def test_the_readme_and_the_page_of_commands_name_every_command():
    readme = (ROOT / "README.md").read_text("utf-8")
    page = (ROOT / "docs" / "commands.md").read_text("utf-8")
    for name, command in COMMANDS.items():
        module = " ".join([command.module, *command.words])
        assert f"| `fullrank {name}` | `{module}` |" in readme, name
        assert module in page, name
