# SPDX-License-Identifier: MIT
"""An exported folder scores as its checkpoint does, or is refused by name."""

import io
import json
import os
import pickle
import re
import shutil
import zlib

import numpy as np
import pytest
import torch

from tests.support import runs
from tests.support.serving import predicted, rows_of
from trainer import export
from trainer.config.config import to_dict
from trainer.serving import Scorer
from trainer.serving.packed_tables import FORMATS, pack, packed_width

LIMITS = {"fp32": 1e-6, "fp16": 1e-3, "int8": 1e-2, "int4": 0.1}
SCHEMA = """
tables:
  - {name: user, num_embeddings: 300, embedding_dim: 8}
  - name: item
    num_embeddings: 512
    embedding_dim: 8
    dynamic: {}
sparse:
  - {name: user_id, table: user}
  - {name: item_id, table: item, side: item}
  - name: clicked
    table: item
    column: hist_item
    kind: sequence
    history: clicks
    max_length: 5
dense:
  - {name: price, transform: log1p, standardize: true}
labels:
  - {name: click}
user: user_id
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return runs.generate(tmp_path_factory.mktemp("logs"), rows_per_day=320)


@pytest.fixture(scope="module")
def run(processes, logs, tmp_path_factory):
    """A run of two ranks with a dynamic table, a history and learnt moments."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "schema.yaml").write_text(SCHEMA)
    config = runs.small(
        "dlrm.demo", logs, "--data.schema", str(folder / "schema.yaml"), "--max-steps", "4"
    )
    processes.run(runs.train, config, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    return {form: made(run, tmp_path_factory.mktemp("models") / form, form) for form in FORMATS}


def made(run, output, form):
    assert export.main([str(run), "--output", str(output), "--tables", form]) == 0
    return output


def _predicted(runtime, run, logs):
    return predicted(runtime, run, logs)


@pytest.mark.dist
@pytest.mark.parametrize("form", FORMATS)
def test_an_export_of_two_ranks_scores_in_one_process_as_its_checkpoint(
    processes, run, logs, exported, form
):
    expected = np.concatenate(processes.run(_predicted, run, logs))[:, 0]
    scorer = Scorer.load(exported[form])
    assert scorer.version.endswith(f"-{form}")
    np.testing.assert_allclose(scorer(rows_of(logs))["click"], expected, atol=LIMITS[form], rtol=0)


@pytest.mark.parametrize("form", FORMATS)
def test_packed_rows_are_within_half_a_step_of_their_range(form):
    weight = torch.randn(500, 32)
    packed = pack(weight, form)
    assert packed.shape == (500, packed_width(32, form)) and packed.dtype == torch.uint8
    if form in ("int8", "int4"):
        bits = int(form[3:])
        found = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(packed, bits)
        step = (weight.amax(1) - weight.amin(1)) / (2**bits - 1)
        assert ((found - weight).abs().amax(1) <= 0.51 * step + 5e-3).all()
    if form == "int8":
        assert packed.numel() <= 0.3 * weight.numel() * 4


def forged(folder, target, change):
    """Copy an export and change it; the manifest's seal is left out, as a careful forger would."""
    copy = shutil.copytree(folder, target)
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["checksum"]
    change(copy, manifest)
    for name in manifest["files"]:
        content = (copy / name).read_bytes()
        if manifest["files"][name] is None:
            manifest["files"][name] = [len(content), zlib.crc32(content)]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


def table(manifest, **values):
    manifest["config"]["schema"]["tables"][0].update(values)


CHANGES = {
    "schema": (lambda _, m: table(m, init_std=0.5), "schema: expected"),
    "seed": (lambda _, m: m.update(seed=7), "seed: expected 0, got 7: the seed has been changed"),
    "hash": (lambda _, m: m["hash"].reverse(), "hash: expected"),
    "tables": (lambda _, m: m.update(tables="int2"), "tables: expected one of"),
    "other tables": (lambda _, m: m.update(tables="int8"), "expected a tensor"),
    "kind": (lambda _, m: m.update(families=[]), "key 'families': expected dict"),
    "tower": (
        lambda _, m: m["config"]["model"]["tower"].update(type="os:system"),
        "config.model.tower.type: expected one of",
    ),
    "proof": (lambda _, m: m["proof"].update(click=[0.5] * 64), "proof: expected the scores"),
    "no proof": (lambda _, m: m["proof"].clear(), "proof: expected the scores"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_an_export_that_is_not_itself_is_refused_by_name(exported, tmp_path, case):
    change, said = CHANGES[case]
    with pytest.raises(ValueError, match=re.escape(said)):
        Scorer.load(forged(exported["fp32"], tmp_path / "model", change))


def test_a_schema_that_claims_more_than_the_files_hold_allocates_nothing(exported, tmp_path):
    def huge(_, manifest):
        from embeddings.schema.schema import schema_from_dict

        table(manifest, num_embeddings=10**12)
        manifest["config"]["model"]["head"]["hidden_units"] = [10**9, 10**9]
        manifest["schema"] = schema_from_dict(manifest["config"]["schema"]).fingerprint()

    with pytest.raises(ValueError, match=r"expected a tensor '.*' of size .*1000000000"):
        Scorer.load(forged(exported["fp32"], tmp_path / "model", huge))


@pytest.mark.parametrize("name", ["manifest.json", "index.json", "rank-0.bin"])
def test_a_file_that_is_cut_or_missing_is_named(exported, tmp_path, name):
    copy = shutil.copytree(exported["int8"], tmp_path / "cut")
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=re.escape(name)):
        Scorer.load(copy)
    (copy / name).unlink()
    with pytest.raises(ValueError):
        Scorer.load(copy)


def test_a_changed_weight_is_refused_by_its_checksum_and_else_by_the_proof(exported, tmp_path):
    copy = shutil.copytree(exported["fp32"], tmp_path / "flipped")
    content = bytearray((copy / "rank-0.bin").read_bytes())
    content[len(content) // 2] ^= 255
    (copy / "rank-0.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"rank-0.bin"):
        Scorer.load(copy)

    def scrambled(folder, manifest):
        values = np.frombuffer((folder / "rank-0.bin").read_bytes(), np.uint8).copy()
        (folder / "rank-0.bin").write_bytes(np.roll(values, 4096).tobytes())
        manifest["files"]["rank-0.bin"] = None

    with pytest.raises(ValueError, match="proof"):
        Scorer.load(forged(exported["fp32"], tmp_path / "scrambled", scrambled))


class Bomb:
    def __init__(self, sign):
        self.sign = sign

    def __reduce__(self):
        return os.mkdir, (str(self.sign),)


@pytest.mark.parametrize("name", ["manifest.json", "index.json", "rank-0.bin"])
def test_a_bomb_in_any_file_does_not_run(exported, tmp_path, name):
    saved = io.BytesIO()
    torch.save(Bomb(tmp_path / "executed"), saved)
    for number, bomb in enumerate([pickle.dumps(Bomb(tmp_path / "executed")), saved.getvalue()]):

        def plant(folder, manifest, bomb=bomb):
            (folder / name).write_bytes(bomb)
            if name in manifest["files"]:
                manifest["files"][name] = None

        copy = forged(exported["fp32"], tmp_path / f"model{number}", plant)
        if name == "manifest.json":
            (copy / name).write_bytes(bomb)
        with pytest.raises(ValueError):
            Scorer.load(copy)
    assert not (tmp_path / "executed").exists()


def test_an_export_tells_nothing_of_the_place_it_comes_from(exported, logs):
    text = (exported["fp32"] / "manifest.json").read_text()
    assert str(logs) not in text


def test_an_export_never_overwrites(run, exported, capfd):
    assert export.main([str(run), "--output", str(exported["fp32"])]) == 2
    assert "expected a new folder, got one that exists" in capfd.readouterr().err
    assert not list(exported["fp32"].parent.glob(".*"))


def test_the_configuration_of_an_export_is_that_of_its_run_without_its_data(run, exported):
    found = to_dict(Scorer.load(exported["int4"]).config)
    ran = json.loads((run / "config.json").read_text())
    assert found["schema"] == ran["schema"] and found["model"] == ran["model"]
    assert found["data"]["path"] == ""
