# SPDX-License-Identifier: MIT
"""Commands that read somebody's run run nothing of it, whichever of its files was forged."""

import io
import json
import os
import pickle
import shutil
import zlib

import pytest
import torch

from pipelines import report
from tests.support import runs
from trainer import compare, evaluate, train
from trainer.checkpoint.dcp_index import INDEX
from trainer.checkpoint.layout import MANIFEST, complete

CHECKPOINT = (MANIFEST, INDEX, "rank-0.bin")
RUN = ("config.json", "curves.jsonl", "ranks.json", "evaluations.jsonl", "metrics.json")


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, sign):
        self.sign = sign

    def __reduce__(self):
        return os.mkdir, (str(self.sign),)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return runs.generate(tmp_path_factory.mktemp("logs"), rows_per_day=256)


def words(logs, output) -> list[str]:
    return [
        *(
            "dlrm.demo",
            "--output",
            str(output),
            "--data.path",
            str(logs),
            "--telemetry.mode",
            "quiet",
        ),
        *("--data.train-days", runs.DAYS[0], "--data.test-days", runs.DAYS[1]),
        *("--loader.batch-size", "64", "--max-steps", "2"),
    ]


@pytest.fixture(scope="module")
def finished(logs, tmp_path_factory):
    output = tmp_path_factory.mktemp("finished") / "run"
    assert train.main(words(logs, output)) == 0
    return output


def bombs(sign) -> list[bytes]:
    saved = io.BytesIO()
    torch.save(Bomb(sign), saved)
    return [pickle.dumps(Bomb(sign)), saved.getvalue()]


def forge(run, name: str, content: bytes) -> None:
    """Replace a file of a run, or of its newest checkpoint, whose manifest then fits."""
    if name not in CHECKPOINT:
        (run / name).write_bytes(content)
        return
    path = complete(run / "checkpoints")[-1]
    (path / name).write_bytes(content)
    if name != MANIFEST:
        manifest = json.loads((path / MANIFEST).read_text())
        del manifest["checksum"]
        manifest["files"][name] = [len(content), zlib.crc32(content)]
        (path / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("command", ["evaluate", "compare", "inherit", "resume"])
@pytest.mark.parametrize("name", CHECKPOINT)
def test_a_forged_checkpoint_is_refused_in_one_line(logs, finished, tmp_path, capfd, command, name):
    for number, bomb in enumerate(bombs(tmp_path / "executed")):
        run = shutil.copytree(finished, tmp_path / f"run{number}")
        (run / "metrics.json").unlink()
        forge(run, name, bomb)
        new = words(logs, tmp_path / f"new{number}")
        code = {
            "evaluate": lambda run=run: evaluate.main([str(run), "--data", str(logs)]),
            "compare": lambda run=run: compare.main([str(run), str(finished), "--data", str(logs)]),
            "inherit": lambda run=run, new=new: train.main([*new, "--inherit.path", str(run)]),
            "resume": lambda run=run: train.main(words(logs, run)),
        }[command]()
        said = capfd.readouterr().err
        assert code == 2 and "Traceback" not in said, said
        assert said.strip().splitlines()[-1].startswith("error: "), said
        assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", RUN)
def test_a_forged_file_of_a_run_is_refused_or_passed_over_by_every_command(
    logs, finished, tmp_path, capfd, name
):
    bomb = bombs(tmp_path / "executed")[0]
    run = shutil.copytree(finished, tmp_path / "run")
    forge(run, name, bomb)
    report.main([str(run), "--output", str(tmp_path / "report")])
    evaluate.main([str(run), "--data", str(logs)])
    train.main(words(logs, run))
    (run / "metrics.json").unlink()
    train.main(words(logs, run))
    assert "Traceback" not in capfd.readouterr().err
    assert not (tmp_path / "executed").exists()
