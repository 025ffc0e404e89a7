# SPDX-License-Identifier: MIT
"""bash completes commands, then recipes, then settings."""

import subprocess

from pipelines import cli
from trainer import train


def complete(script: str, *words: str) -> list[str]:
    given = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; _fullrank; "
    code = f'{script}\n{ask} printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_recipes_and_settings_of_the_training_module(capsys):
    assert train.main(["--completion"]) == 0
    script = capsys.readouterr().out
    assert "specformer.demo" in complete(script, "fullrank-train", "specf")
    settings = complete(script, "fullrank-train", "dlrm.demo", "--dense.learning-r")
    assert settings == ["--dense.learning-rate"]
    tower = complete(script, "fullrank-train", "specformer.demo", "--model.tower.")
    assert "--model.tower.num-layers" in tower


def test_bash_completes_the_words_of_the_installed_command(capsys, tmp_path):
    assert cli.main(["--completion"]) == 0
    script = capsys.readouterr().out
    assert complete(script, "fullrank", "eva") == ["evaluate"]
    assert complete(script, "/opt/bin/fullrank", "train", "dlrm.dem") == ["dlrm.demo"]
    settings = complete(script, "fullrank", "plan", "dlrm.demo", "--dense.learning-r")
    assert settings == ["--dense.learning-rate"]
    (tmp_path / "a_run").touch()
    assert complete(script, "fullrank", "report", f"{tmp_path}/a_") == [f"{tmp_path}/a_run"]
