# SPDX-License-Identifier: MIT
"""bash completes recipes, then settings."""

import subprocess

from trainer import train


def complete(script: str, *words: str) -> list[str]:
    given = " ".join(f"'{word}'" for word in ("fullrank-train", *words))
    ask = f"COMP_WORDS=({given}); COMP_CWORD={len(words)}; _fullrank_train; "
    code = f'{script}\n{ask} printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_recipes_and_settings(capsys):
    assert train.main(["--completion"]) == 0
    script = capsys.readouterr().out
    assert "specformer.demo" in complete(script, "specf")
    assert complete(script, "dlrm.demo", "--dense.learning-r") == ["--dense.learning-rate"]
    assert "--model.tower.num-layers" in complete(script, "specformer.demo", "--model.tower.")
