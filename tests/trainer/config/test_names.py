# SPDX-License-Identifier: MIT
"""The names of recipes and settings: current, and enough to refuse a command line without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config import names
from trainer.config.overrides import setting_kinds
from trainer.recipes.load import load_recipe
from trainer.recipes.write_names import generate

ROOT = Path(__file__).resolve().parents[3]
HEAVY = {"torch", "torchrec", "fbgemm_gpu", "pyarrow", "pandas", "matplotlib", "tyro", "deepspeed"}
PROGRAM = """
import importlib, json, sys
module, *words = sys.argv[1:]
try:
    code = importlib.import_module(module).main(words)
except SystemExit as stop:
    code = stop.code
print(json.dumps([code or 0, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def run(module: str, *words: str) -> tuple[int, set[str], str]:
    """Run a command in a fresh process: its exit code, the packages it imported, its errors."""
    command = [sys.executable, "-c", PROGRAM, module, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    code, packages = json.loads(done.stdout.splitlines()[-1])
    return code, set(packages), done.stderr


def test_the_file_of_names_is_current():
    way_out = "run `python -m trainer.recipes.write_names` and commit the file"
    assert names.FILE.read_text(encoding="utf-8") == generate(), way_out


@pytest.mark.parametrize("name", ["dlrm.globo", "specformer.demo", "tokenformer.demo"])
def test_the_names_of_a_recipe_are_its_own_and_no_other(name):
    assert names.names().of(name) == setting_kinds(load_recipe(name))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("trainer.train --help", 0),
        ("trainer.train --list", 0),
        ("trainer.train --completion", 0),
        ("trainer.train dlrm.demmo --output x", 2),
        ("trainer.train dlrm.demo --output x --loader.batchsize 3", 2),
        ("trainer.train dlrm.demo --output x --batch-size 3", 2),
        ("trainer.train specformer.demo --output x --model.tower.num-layer 3", 2),
        ("trainer.train dlrm.demo --output x --loader.order tim", 2),
        ("trainer.train dlrm.demo --output x --epochs many", 2),
        ("trainer.train dlrm.demmo --help", 2),
        ("trainer.plan --help", 0),
        ("trainer.plan dlrm.demmo --world-size 8", 2),
        ("trainer.plan dlrm.demo --world-size 8 --loader.batchsize 3", 2),
        ("trainer.doctor --help", 0),
        ("trainer.evaluate --help", 0),
        ("trainer.compare --help", 0),
        ("pipelines.cli --help", 0),
        ("pipelines.cli --completion", 0),
        ("pipelines.cli trian dlrm.demo", 2),
        ("pipelines.cli train --help", 0),
        ("pipelines.cli train --list", 0),
        ("pipelines.cli train dlrm.demmo --output x", 2),
        ("pipelines.cli train dlrm.demo --output x --loader.batchsize 3", 2),
    ],
)
def test_help_lists_and_misspelt_words_are_answered_without_a_heavy_package(words, code):
    found, packages, errors = run(*words.split())
    assert found == code
    assert not packages & HEAVY
    assert "Traceback" not in errors and (len(errors.splitlines()) == 1) == (code == 2)


def test_what_the_sources_have_and_the_file_lacks_is_left_to_the_complete_check(monkeypatch):
    whole = names.names()
    assert "--loader.num-workers" in whole.settings
    older = whole._replace(
        recipes={name: text for name, text in whole.recipes.items() if name != "dlrm.demo"},
        settings={k: v for k, v in whole.settings.items() if k != "--loader.num-workers"},
    )
    monkeypatch.setattr(names, "names", lambda: older)
    names.check_command("dlrm.demo", ["--loader.num-workers", "2"])
    names.check_command("hstu.demo", ["--loader.num-workers", "2"])
    with pytest.raises(ValueError, match=r"unknown setting --loader\.num-wokers"):
        names.check_command("hstu.demo", ["--loader.num-wokers", "2"])
    with pytest.raises(ValueError, match=r"'hstu\.dmo' does not exist, did you mean 'hstu\.demo'"):
        names.check_command("hstu.dmo", [])


def test_a_recipe_from_outside_is_left_to_the_complete_check():
    names.check_command("somebody.recipes:feed", ["--anything", "at all"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"recipes": {}}'])
def test_a_damaged_file_of_names_is_named_with_the_way_out(text, tmp_path, monkeypatch):
    monkeypatch.setattr(names, "FILE", tmp_path / "names.json")
    names.FILE.write_text(text, encoding="utf-8")
    names.names.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"names\.json: expected the names of recipes"):
            names.names()
    finally:
        names.names.cache_clear()
