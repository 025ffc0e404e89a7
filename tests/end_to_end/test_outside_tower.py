# SPDX-License-Identifier: MIT
"""A tower from a package of its own: trained on two ranks, saved, evaluated, compared, reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines import report
from tests.support import runs
from tests.support.outside_tower import announce, write_package
from trainer import compare, evaluate
from trainer.config.config import config_from_dict, to_dict
from trainer.config.names import check_command
from trainer.recipes.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
TOWER = "acme.towers:AcmeConfig"


@pytest.fixture(autouse=True)
def _forget_acme() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme"]:
        del sys.modules[name]


def train(output: Path, logs: Path, packages: Path) -> str:
    """Train on two ranks, as a user would; return what the run printed."""
    words = ["acme.recipes:feed", "--output", str(output), "--data.path", str(logs)]
    words += ["--data.train-days", runs.DAYS[0], "--data.test-days", runs.DAYS[1]]
    words += ["--telemetry.mode", "plain", "--loader.batch-size", "64"]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(packages), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *start, "-m", "trainer.train", *words],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=output.parent,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.launch
def test_a_tower_of_another_package_goes_through_every_command_and_no_file_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs, packages = runs.generate(tmp_path / "logs"), write_package(tmp_path / "packages")
    run = tmp_path / "run"
    assert "acme multiplies in torch.float32 on cpu" in train(run, logs, packages)
    config = json.loads((run / "config.json").read_text())
    assert config["model"]["tower"] == {"hidden": 8, "warmup": 0.5, "type": TOWER}
    assert config["recipe"] == "acme.recipes:feed"
    ranks = json.loads((run / "ranks.json").read_text())
    assert "blocks.0" in {record["path"] for record in ranks}

    # The package lies ready to be imported, and no command does so because the folder names it.
    monkeypatch.syspath_prepend(str(packages))
    page = tmp_path / "report.html"
    assert report.main([str(run), "--output", str(page)]) == 0
    text = page.read_text()
    assert "Acme" in text and "acme.recipes:feed" in text
    words = [str(run), "--data", str(logs), "--days", runs.DAYS[1]]
    for command in (evaluate, compare):
        capsys.readouterr()
        assert command.main(words) == 2
        answer = capsys.readouterr().err
        assert TOWER in answer and "--tower package.module:Class" in answer
        assert "entry point in the group 'fullrank.towers'" in answer
    assert not [name for name in sys.modules if name.startswith("acme")]

    capsys.readouterr()
    assert evaluate.main([*words, "--tower", TOWER]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["auc"] == pytest.approx(json.loads((run / "metrics.json").read_text())["auc"])
    assert compare.main([words[0], *words, "--tower", TOWER, "--replicates", "5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["models"][0]["auc"] == pytest.approx(metrics["auc"])
    assert found["differences"]["auc"]["difference"] == 0


@pytest.mark.parametrize("value", [TOWER, "acme.recipes:model"])
def test_an_announced_tower_is_a_recipe_with_every_log_and_found_again_in_its_configuration(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = write_package(tmp_path)
    with (packages / "acme/recipes.py").open("a") as file:
        file.write("\n\ndef model():\n    return ModelConfig(tower=AcmeConfig(hidden=4))\n")
    announce(packages, value)
    monkeypatch.syspath_prepend(str(packages))
    check_command("acme.demo", ["--epochs", "2"])
    for log in ("demo", "globo", "criteo"):
        config = load_recipe(f"acme.{log}")
        assert config.recipe == f"acme.{log}" and config.outside_tower == TOWER
        assert config.has_warmup
        assert config_from_dict(json.loads(json.dumps(to_dict(config)))) == config
    with pytest.raises(ValueError, match=r"'acme\.nolog' does not exist"):
        load_recipe("acme.nolog")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("acme.nowhere:Tower", "its package cannot be loaded"),
        ("acme.towers:Nothing", "its package cannot be loaded"),
        ("acme.recipes:feed", "or to return a ModelConfig, got TrainConfig"),
    ],
)
def test_an_entry_point_that_is_no_tower_is_named_with_its_value(
    value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(write_package(tmp_path), value)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=message) as error:
        load_recipe("acme.demo")
    assert value in str(error.value)


@pytest.mark.parametrize(
    "recipe", ["bomb:run", "bomb.deep:run", "bomb", "bomb.demo", 3, None, ["bomb:run"], {"a": 1}]
)
def test_a_report_never_imports_the_recipe_that_a_folder_names(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bomb.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "run"
    folder.mkdir()
    config = {"recipe": recipe, "model": {"tower": {"type": "bomb:Tower"}}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.json").write_text(json.dumps({"auc": 0.7, "rows": 10}))
    report.main([str(folder), "--output", str(tmp_path / "page.html")])
    assert "bomb" not in sys.modules
