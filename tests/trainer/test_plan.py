# SPDX-License-Identifier: MIT
"""The command that plans tables: what it reads, prints and refuses."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from embeddings.sharding.plans import plan_from_dict
from tests.support.tiny import SCHEMA
from trainer import plan
from trainer.config.config import write_config
from trainer.plan import main, parse_bytes
from trainer.recipes.load import load_recipe


def test_a_schema_a_recipe_and_a_runs_configuration_are_planned_without_the_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema, config = tmp_path / "schema.yaml", tmp_path / "config.json"
    schema.write_text(yaml.safe_dump(SCHEMA.to_dict()), encoding="utf-8")
    write_config(load_recipe("dlrm.demo"), config)
    for source in (str(schema), str(config), "dlrm.demo"):
        words = [source, "--world-size", "64", "--hbm", "80GiB", "--loader.batch-size", "256"]
        assert main([*words, "--json"]) == 0
        found = plan_from_dict(json.loads(capsys.readouterr().out), "stdout")
        assert (found.world_size, found.local_world_size, found.batch_size) == (64, 8, 256)
        assert {table.module.split(".")[0] for table in found.tables} == {"embeddings"}
        assert main(words) == 0
        assert len(capsys.readouterr().out.splitlines()) == len(found.tables) + 3


def test_tables_that_do_not_fit_end_the_command_with_1_and_say_what_to_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["dlrm.demo", "--world-size", "2", "--local-world-size", "2", "--hbm", "100kB"]
    assert main(words) == 1
    assert "does not fit: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dlrm.demos"], "did you mean 'dlrm.demo'"),
        (["dlrm.demo", "--hbm", "80 apples"], "expected a size such as 80GiB"),
        (["dlrm.demo", "--local-world-size", "3"], "a positive multiple of the ranks of a machine"),
        (["nothing.json"], "expected a run's config.json"),
    ],
)
def test_a_wrong_word_ends_the_command_with_2_and_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--world-size", "64"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_sizes_are_read_in_binary_and_decimal_units() -> None:
    assert parse_bytes("80GiB") == 80 * 2**30
    assert parse_bytes("1.5 TB") == 1_500_000_000_000
    assert parse_bytes("85899345920") == 80 * 2**30
    with pytest.raises(ValueError, match="got '80', which is 80 bytes"):
        parse_bytes("80")


def test_the_module_is_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for words in (["dlrm.demo", "--world-size", "128", "--hbm", "80GiB"], ["--help"]):
        monkeypatch.setattr(sys, "argv", ["plan.py", *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(plan.__file__, run_name="__main__")
        assert ended.value.code == 0
        printed.append(capsys.readouterr().out)
    assert "on 128 cuda ranks" in printed[0] and printed[0].endswith("everything fits\n")
    assert printed[1].startswith("usage: python -m trainer.plan ")


def test_planning_tables_imports_no_command() -> None:
    words = [
        sys.executable,
        "-c",
        "import sys, embeddings.sharding.sharding, embeddings.stats\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('trainer', 'models')])",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
