# SPDX-License-Identifier: MIT
"""A checkpoint that somebody forged, checksums and all, runs nothing, hangs nothing, fills nothing.

Whoever can write a checkpoint's folder can make every checksum fit. So what is read is checked for
what it claims, and nothing that is read is ever unpickled.
"""

import io
import itertools
import json
import math
import os
import pickle
import random
import zlib
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from trainer.checkpoint import dcp, dcp_index
from trainer.checkpoint.dcp_files import Planner
from trainer.checkpoint.dcp_index import INDEX, parse_index
from trainer.checkpoint.layout import MANIFEST, data_folder, read_manifest
from trainer.warm_start.partial_load import RegionPlanner

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, sign):
        self.sign = sign

    def __reduce__(self):
        return os.mkdir, (str(self.sign),)


def tensors() -> dict:
    return {"model": {"weight": torch.arange(6.0).view(2, 3)}, "scalar": torch.ones(())}


@pytest.fixture
def checkpoint(tmp_path):
    return dcp.save(tensors(), tmp_path / "run", 1, {})


def seal(path, **changes) -> None:
    """Make the manifest fit the files that are there."""
    content = read_manifest(path) | changes
    for name in content["files"]:
        file = path / name
        if file.is_file():
            data = file.read_bytes()
            content["files"][name] = [len(data), zlib.crc32(data)]
    (path / MANIFEST).write_text(json.dumps(content))


def read(path) -> None:
    dcp.tensor_sizes(path)
    dcp.load(tensors(), path)


def refused(path, words: str = "step-1") -> None:
    with pytest.raises(ValueError, match=words) as failure:
        read(path)
    assert "\n" not in str(failure.value), "a name in a message cannot begin a line of its own"
    assert len(str(failure.value)) < 1000


@pytest.mark.parametrize("name", [INDEX, "rank-0.bin", MANIFEST])
def test_a_pickle_in_the_place_of_any_file_is_not_unpickled(tmp_path, checkpoint, name):
    sign = tmp_path / "executed"
    for bomb in (pickle.dumps(Bomb(sign)), _torch_saved(Bomb(sign))):
        (checkpoint / name).write_bytes(bomb)
        if name != MANIFEST:
            seal(checkpoint)
        refused(checkpoint, "damaged")
        assert not sign.exists()
    pickle.loads(bomb) if bomb[:2] == b"\x80\x05" else torch.load(
        io.BytesIO(bomb), weights_only=False
    )
    assert sign.exists(), "the bomb is one"


def _torch_saved(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_a_checkpoint_of_the_format_that_holds_pickles_is_refused_by_its_number(checkpoint):
    for number in (1, 3, True, "2\nforged line", [2]):
        seal(checkpoint)
        content = read_manifest(checkpoint)
        (checkpoint / MANIFEST).write_text(json.dumps(content | {"format": number}))
        refused(checkpoint, "this version reads format 2; use the version that wrote it")
        (checkpoint / MANIFEST).write_text(json.dumps(content))


@pytest.mark.parametrize("planner", [Planner(), RegionPlanner([])])
def test_planners_refuse_bytes(tmp_path, planner):
    class Item:
        class storage_index:
            fqn = "model.weight"

    with pytest.raises(ValueError, match=r"'model\.weight' is no tensor"):
        planner.load_bytes(Item, io.BytesIO(_torch_saved(Bomb(tmp_path / "executed"))))
    assert not (tmp_path / "executed").exists()


def test_only_tensors_are_written_and_filled(tmp_path, checkpoint):
    with pytest.raises(dcp.RunError, match="expected a tensor"):
        dcp.save({"model": {"name": "words"}}, tmp_path, 2, {})
    with pytest.raises(TypeError, match="expected a tensor"):
        dcp.load({"model": {"weight": "words"}}, checkpoint)


CHUNK = [[0, 0], [2, 3], "rank-0.bin", 0]
ENTRY = {"dtype": "float32", "size": [2, 3], "chunks": [CHUNK]}


def chunk(*places_and_values) -> dict:
    """The entry with parts of its chunk replaced."""
    changed = list(CHUNK)
    for place, value in zip(places_and_values[::2], places_and_values[1::2], strict=True):
        changed[place] = value
    return ENTRY | {"chunks": [changed]}


def deep(depth: int) -> bytes:
    return b"[" * depth


ENTRIES = {
    "bytes": {"kind": "bytes"},
    "a word": "tensor",
    "no dtype": {key: ENTRY[key] for key in ("size", "chunks")},
    "a dtype that is an object": ENTRY | {"dtype": "object"},
    "a dtype that is a list": ENTRY | {"dtype": ["float32"]},
    "a dtype that is an attribute of torch": ENTRY | {"dtype": "hub"},
    "a dtype with scales": ENTRY | {"dtype": "qint8"},
    "a negative size": ENTRY | {"size": [-2, -3]},
    "a size that is no number": ENTRY | {"size": [2.0, 3]},
    "a size that is true": ENTRY | {"size": [True, 6]},
    "a size beyond 64 bits": ENTRY | {"size": [1 << 70, 0]},
    "a larger size than its chunks": ENTRY | {"size": [1 << 40, 3]},
    "a smaller size than its chunks": ENTRY | {"size": [1, 3]},
    "no chunks": ENTRY | {"chunks": []},
    "chunks that are a number": ENTRY | {"chunks": 4},
    "a chunk that is a word": ENTRY | {"chunks": ["chunk"]},
    "the same chunk twice": ENTRY | {"chunks": [CHUNK, CHUNK], "size": [4, 3]},
    "other dimensions": chunk(0, [0], 1, [6]),
    "many dimensions": ENTRY | {"size": [1] * 9, "chunks": [[[0] * 9, [1] * 9, "rank-0.bin", 0]]},
    "outside of the tensor": chunk(0, [1, 0]),
    "a negative offset": chunk(0, [-1, 0]),
    "before the file": chunk(3, -8),
    "after the file": chunk(3, 1 << 40),
    "between two tensors": chunk(3, 4),
    "the parent's file": chunk(2, "../rank-0.bin"),
    "an absolute file": chunk(2, "/etc/passwd"),
    "a file in a folder": chunk(2, "x/rank-0.bin"),
    "a file that is a number": chunk(2, 0),
    "a file that the manifest lacks": chunk(2, "rank-7.bin"),
    "the index itself": chunk(2, INDEX),
    "a chunk without a place": ENTRY | {"chunks": [CHUNK[:3]]},
    "a larger chunk than its file": {
        "dtype": "float32",
        "size": [2000, 3],
        "chunks": [[[0, 0], [2000, 3], "rank-0.bin", 0]],
    },
}


@pytest.mark.parametrize("entry", [pytest.param(e, id=name) for name, e in ENTRIES.items()])
def test_an_index_that_claims_what_the_files_do_not_hold_is_refused(checkpoint, entry):
    index = json.loads((checkpoint / INDEX).read_bytes())
    assert index["tensors"]["model.weight"] == ENTRY
    index["tensors"]["model.weight"] = entry
    (checkpoint / INDEX).write_text(json.dumps(index))
    seal(checkpoint)
    refused(checkpoint, "index.json: damaged")


@pytest.mark.parametrize("name", ["a\nline", "a" * 2000, "\x1b[2J", "\u2028"])
def test_a_name_that_could_forge_a_line_of_a_log_is_refused(checkpoint, name):
    index = json.loads((checkpoint / INDEX).read_bytes())
    index["tensors"][name] = index["tensors"].pop("model.weight")
    (checkpoint / INDEX).write_text(json.dumps(index))
    seal(checkpoint)
    refused(checkpoint, "index.json: damaged")


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"null", b"[]", b'{"tensors": 3}', b"\xff", b"1" * 5000),
        *(deep(200_000), b'{"tensors":' * 90_000, deep(900) + b"]" * 900),
        b'{"tensors":' * 900 + b"1" + b"}" * 900,
    ],
)
@pytest.mark.parametrize("name", [INDEX, MANIFEST])
def test_what_is_no_json_object_or_is_nested_without_end_is_refused(checkpoint, name, content):
    (checkpoint / name).write_bytes(content)
    if name == INDEX:
        seal(checkpoint)
    refused(checkpoint, "damaged")


@pytest.mark.parametrize("name", [INDEX, MANIFEST])
def test_a_file_of_settings_larger_than_any_is_not_read(checkpoint, name):
    os.truncate(checkpoint / name, 1 << 40)
    refused(checkpoint, "larger than")


@pytest.mark.parametrize("name", [INDEX, "rank-0.bin", MANIFEST])
def test_a_link_or_a_pipe_in_the_place_of_a_file_is_not_opened(tmp_path, checkpoint, name):
    original = (checkpoint / name).rename(tmp_path / "moved")
    (checkpoint / name).symlink_to(original)
    refused(checkpoint)
    (checkpoint / name).unlink()
    (checkpoint / name).symlink_to("/dev/zero")
    refused(checkpoint)
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    refused(checkpoint)
    (checkpoint / name).unlink()
    (checkpoint / name).mkdir()
    refused(checkpoint)


@pytest.mark.parametrize("data", ["..", "/etc", "../other/step-1", "data-x/../..", 5, ["data-0"]])
def test_a_manifest_that_leads_out_of_its_folder_is_refused(checkpoint, data):
    seal(checkpoint, data=data)
    with pytest.raises(ValueError, match="key 'data'"):
        data_folder(checkpoint, read_manifest(checkpoint))
    refused(checkpoint, "key 'data'")


@pytest.mark.parametrize(
    "files",
    [
        {"../rank-0.bin": [1, 2]},
        {"/etc/passwd": [1, 2]},
        {"": [1, 2]},
        {"rank-0.bin\nforged": [1, 2]},
        {"rank-0.bin": 4},
        {"rank-0.bin": [1]},
        {"rank-0.bin": ["1", "2"]},
        {"rank-0.bin": [-1, 2]},
        {"rank-0.bin": [1.5, True]},
    ],
)
def test_a_manifest_of_files_that_are_not_beside_it_is_refused(checkpoint, files):
    seal(checkpoint)
    content = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / MANIFEST).write_text(json.dumps(content | {"files": content["files"] | files}))
    refused(checkpoint, "key 'files'")


def test_what_a_forged_index_may_claim_is_bounded_by_its_files():
    ones = {f"t{i}": {"dtype": "int64", "size": [4], "chunks": []} for i in range(3)}
    for i, entry in enumerate(ones.values()):
        entry["chunks"] = [[[0], [4], "rank-0.bin", 32 * i]]
    files = {"rank-0.bin": 96}
    parse_index(json.dumps({"tensors": ones}).encode(), files)
    for entry in ones.values():  # all of them the same bytes
        entry["chunks"] = [[[0], [4], "rank-0.bin", 0]]
    with pytest.raises(ValueError, match="no chunk begins there"):
        parse_index(json.dumps({"tensors": ones}).encode(), files)


LAYOUTS = {
    "rows": ([6], [([0], [2]), ([2], [4])]),
    "rows of a rank that has none": ([6], [([0], [6]), ([6], [0])]),
    "columns": ([4, 6], [([0, 0], [4, 3]), ([0, 3], [4, 3])]),
    "columns that are cut into different rows": (
        [4, 6],
        [([0, 0], [1, 3]), ([1, 0], [3, 3]), ([0, 3], [2, 3]), ([2, 3], [2, 3])],
    ),
    "a wheel": (
        [3, 3],
        [([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1]), ([1, 1], [1, 1])],
    ),
    "a scalar": ([], [([], [])]),
}
GAPS = {
    "rows twice": ([6], [([0], [3]), ([2], [3])]),
    "columns twice": ([2, 4], [([0, 0], [2, 2]), ([0, 1], [2, 2])]),
    "one inside of another": ([4, 4], [([0, 0], [3, 4]), ([1, 0], [1, 4])]),
    "a corner": ([4, 4], [([0, 0], [2, 4]), ([2, 0], [2, 2]), ([1, 2], [2, 2])]),
    "four dimensions": ([2] * 4, [([0] * 4, [1] * 4), ([1] * 4, [1] * 4)]),
}


def index_of(size, blocks) -> tuple[bytes, dict]:
    """An index of one tensor of bytes in `blocks`, and the size of its file."""
    chunks, at = [], 0
    for offsets, sizes in blocks:
        chunks.append([offsets, sizes, "rank-0.bin", at])
        at += math.prod(sizes)
    entry = {"dtype": "uint8", "size": size, "chunks": chunks}
    return json.dumps({"tensors": {"weight": entry}}).encode(), {"rank-0.bin": at}


@pytest.mark.parametrize("name", LAYOUTS)
def test_chunks_that_hold_every_element_once_are_read_however_they_are_cut(name):
    parse_index(*index_of(*LAYOUTS[name]))


@pytest.mark.parametrize("name", GAPS)
def test_chunks_that_hold_an_element_twice_and_another_never_are_refused(name):
    with pytest.raises(ValueError, match=r"each element once|3 dimensions at most"):
        parse_index(*index_of(*GAPS[name]))


def test_random_blocks_are_accepted_if_and_only_if_each_element_is_held_once():
    draw = random.Random(0)
    accepted = 0
    for _ in range(2000):
        size, held = (3, 3), Counter()
        blocks = {}
        while sum(map(math.prod, blocks.values())) < 9:
            start = draw.randrange(3), draw.randrange(3)
            blocks[start] = tuple(draw.randint(1, 3 - at) for at in start)
        for (row, column), (rows, columns) in blocks.items():
            held.update(itertools.product(range(row, row + rows), range(column, column + columns)))
        is_whole = sorted(held.elements()) == list(itertools.product(range(3), repeat=2))
        accepted += is_whole
        try:
            parse_index(*index_of(list(size), [(list(a), list(b)) for a, b in blocks.items()]))
            assert is_whole, blocks
        except ValueError:
            assert not is_whole, blocks
    assert 10 < accepted < 1990


def test_an_index_that_nobody_could_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(dcp_index, "INDEX_BYTES", 100)
    with pytest.raises(dcp.RunError, match="an index of 100 bytes at most"):
        dcp.save(tensors(), tmp_path, 2, {})
    assert not list(tmp_path.glob("step-*"))
