# SPDX-License-Identifier: MIT
"""A delta makes of an exported model the newer one, bit by bit, while the older one answers."""

import json
import re
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support import runs
from tests.support.serving import rows_of, trained
from trainer import export
from trainer.serving import Scorer


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return runs.generate(tmp_path_factory.mktemp("logs"), rows_per_day=320)


@pytest.fixture(scope="module")
def models(logs, tmp_path_factory):
    """An older model, two newer ones whole, and the deltas that lead from each to the next."""
    folder = tmp_path_factory.mktemp("models")
    before = trained(folder / "a", "dlrm.demo", logs)
    inherit = ["--inherit.policy", "nightly", "--inherit.path"]
    second = trained(folder / "b", "dlrm.demo", logs, *inherit, str(before))
    third = trained(folder / "c", "dlrm.demo", logs, *inherit, str(second))
    since = ["--since", str(folder / "first")]
    for run, name, words in (
        (before, "first", ["--tables", "int8"]),
        (second, "second", ["--tables", "int8"]),
        (third, "third", ["--tables", "int8"]),
        (second, "to-second", since),
        (third, "to-third", [*since, "--after", str(folder / "to-second")]),
    ):
        assert export.main([str(run), "--output", str(folder / name), *words]) == 0
    return folder


def test_a_delta_makes_the_newer_model_bit_by_bit(models, logs):
    rows = rows_of(logs)
    older = Scorer.load(models / "first")
    before = older(rows)["click"]
    scorer = older.updated(models / "to-second")
    for delta, name in ((None, "second"), ("to-third", "third")):
        scorer = scorer.updated(models / delta) if delta else scorer
        whole = Scorer.load(models / name)
        assert scorer.version == whole.version
        for task, expected in whole(rows).items():
            np.testing.assert_array_equal(scorer(rows)[task], expected)
    np.testing.assert_array_equal(older(rows)["click"], before)
    again = Scorer.load(models / "first", deltas=[models / "to-second", models / "to-third"])
    np.testing.assert_array_equal(again(rows)["click"], scorer(rows)["click"])


def test_a_delta_holds_the_rows_that_differ_alone(models):
    sizes = [(models / name / "rank-0.bin").stat().st_size for name in ("to-second", "second")]
    assert sizes[0] < sizes[1]


def test_requests_go_on_while_a_delta_is_applied_and_none_is_mixed(models, logs):
    rows = rows_of(logs).slice(0, 40)
    serving = [Scorer.load(models / "first")]
    expected = {
        scorer.version: scorer(rows)["click"]
        for scorer in (serving[0], Scorer.load(models / "second"))
    }

    def ask(_):
        scorer = serving[0]
        return scorer.version, scorer(rows)["click"]

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(ask, number) for number in range(30)]
        serving[0] = serving[0].updated(models / "to-second")
        answers += [pool.submit(ask, number) for number in range(5)]
        found = [answer.result() for answer in answers]
    for version, click in found:
        np.testing.assert_array_equal(click, expected[version])
    assert {version for version, _ in found[-5:]} == {serving[0].version}


def forged(folder, target, change):
    copy = shutil.copytree(folder, target)
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["checksum"]
    change(copy, manifest)
    for name in manifest["files"]:
        content = (copy / name).read_bytes()
        manifest["files"][name] = [len(content), zlib.crc32(content)]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


def _rows_outside(folder, _):
    content = (folder / "index.json").read_bytes()
    index = json.loads(content)["tensors"]
    name = next(one for one in index if one.startswith("rows.embeddings"))
    at = index[name]["chunks"][0][3]
    values = bytearray((folder / "rank-0.bin").read_bytes())
    values[at : at + 8] = (10**12).to_bytes(8, "little")
    (folder / "rank-0.bin").write_bytes(values)


def _renamed(folder, _):
    content = (folder / "index.json").read_text()
    (folder / "index.json").write_text(content.replace("rows.tower", "rows.tower_of_another", 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _, m: m.update(base="step-9-0"), "base: expected"),
        (lambda _, m: m.update(tables="int4"), "tables: expected 'int8', got 'int4'"),
        (lambda _, m: m.update(schema="0"), "schema: expected"),
        (_rows_outside, "expected rows in [0,"),
        (_renamed, "is no part of this model"),
        (lambda _, m: m["proof"].update(click=[0.5] * 64), "proof: expected"),
    ],
    ids=["base", "tables", "schema", "rows", "name", "proof"],
)
def test_a_delta_that_does_not_fit_is_refused_by_name(models, tmp_path, change, said):
    scorer = Scorer.load(models / "first")
    with pytest.raises(ValueError, match=re.escape(said)):
        scorer.updated(forged(models / "to-second", tmp_path / "delta", change))


def test_deltas_of_what_was_not_exported_or_of_another_schema_are_refused(
    models, logs, tmp_path, capfd
):
    run = models / "a" / "dlrm.demo"
    with pytest.raises(ValueError, match="changes an exported model, and this is none"):
        Scorer.load(run).updated(models / "to-second")
    with pytest.raises(ValueError, match="deltas belong to exported models"):
        Scorer.load(run, deltas=[models / "to-second"])
    other = trained(tmp_path, "specformer.demo", logs)
    words = [str(other), "--output", str(tmp_path / "delta"), "--since", str(models / "first")]
    assert export.main(words) == 2
    assert "a delta changes weights alone" in capfd.readouterr().err
    assert export.main([*words[:3], "--after", str(models / "to-second")]) == 2
    assert "name it with --since" in capfd.readouterr().err
