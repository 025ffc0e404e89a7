# SPDX-License-Identifier: MIT
"""The fuzzer finds what it must, and the readers pass a short run of it."""

import importlib
import os
import subprocess
import sys
from random import Random

import pytest

from tests.fuzz import worker
from tests.fuzz.mutate import damage_bytes, damage_tree
from tests.fuzz.run import fuzz, keep
from tests.fuzz.targets import TARGETS, Target, refused
from tests.fuzz.worker import Watch, case


class Planted(Target):
    """A reader with one fault."""

    name = "planted"

    def damaged(self, random):
        return {"input": random.randbytes(4)}

    def read(self, files):
        self.write(files)


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Return what a case of a reader comes to."""
    monkeypatch.setattr(worker, "CPU_SECONDS", 0.2)
    previous = worker.signal.signal(worker.signal.SIGPROF, worker.on_time)
    watch = Watch(tmp_path)

    def run(read):
        target = Planted(tmp_path)
        target.read = read
        return case(target, watch, 0, 1)

    yield run
    worker.sys.meta_path.remove(watch)
    worker.signal.signal(worker.signal.SIGPROF, previous)


def refuse_silently(_):
    try:
        raise ValueError
    except ValueError as error:
        refused(error)


def refuse_at_length(_):
    refused(ValueError("x" * 100_000))


def spin(_):
    while True:
        pass


@pytest.mark.parametrize(
    ("read", "signature"),
    [
        (lambda _: {}["missing"], "KeyError at"),
        (refuse_silently, "an answer for no person: 'a ValueError without a message"),
        (refuse_at_length, "an answer for no person: 'the message has 100,000 characters"),
        (spin, "more than 0 s"),
        (lambda _: os.system("true"), "ran code: os.system"),
        (lambda _: subprocess.run(["true"]), "ran code: subprocess.Popen"),
        (lambda _: importlib.import_module("fuzzbomb.inner"), "ran code: import"),
        (lambda _: [0] * (1 << 60), "memory: MemoryError at"),
    ],
)
def test_a_reader_that_fails_is_a_finding_of_its_kind(found, read, signature):
    result = found(read)
    assert result is not None and result[0].startswith(signature)


def test_a_file_written_elsewhere_is_a_finding_and_one_in_the_folder_is_none(
    found, tmp_path, tmp_path_factory
):
    assert found(lambda _: (tmp_path / "out").write_text("x")) is None
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "out"
    result = found(lambda _: elsewhere.write_text("x"))
    assert result is not None and result[0].startswith("ran code: wrote")


def test_damage_is_the_same_for_the_same_seed_and_leaves_the_input_alone():
    tree = {"a": [1, {"b": "text"}], "c": 0.5}
    before = repr(tree)
    for seed in range(200):
        assert repr(damage_tree(tree, Random(seed))) == repr(damage_tree(tree, Random(seed)))
        data = damage_bytes(b"a,b\n1,2\n", Random(seed))
        assert data == damage_bytes(b"a,b\n1,2\n", Random(seed))
    assert repr(tree) == before
    assert len({repr(damage_tree(tree, Random(seed))) for seed in range(200)}) > 100


def test_a_worker_that_dies_is_a_finding_and_the_cases_after_it_are_read(tmp_path, monkeypatch):
    # The worker is a process of its own: one whose third case kills it stands in for the reader.
    code = (
        "import os, sys, pathlib; start = int(sys.argv[4]); folder = pathlib.Path(sys.argv[2])\n"
        "for n in range(start, int(sys.argv[5])):\n"
        "    (folder / 'current').write_text(f'{n:12d}')\n"
        "    if n == 2: os.abort()\n"
        "print('{\"done\": 6}')\n"
    )
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda words, **more: real([sys.executable, "-c", code, *words[3:]], **more),
    )
    monkeypatch.setitem(TARGETS, "planted", Planted)
    findings = fuzz("planted", 0, 6, 60.0, 1)
    assert (findings.cases, list(findings.counts)) == (6, ["the process died with code -6"])
    keep(findings, 0, tmp_path)
    assert (tmp_path / "planted-0-2" / "input").read_bytes()


class Twice(Random):
    """Damages the same file in both of two turns."""

    def sample(self, population, k, **_):
        return [population[0]] * k


def test_a_file_that_is_too_deep_for_python_is_damaged_no_further(tmp_path):
    target = TARGETS["report"](tmp_path)
    target.files["config.json"] = b"[" * 100_000
    for seed in range(20):
        assert target.damaged(Twice(seed)).keys() == target.files.keys()


# Cases of each kind that every run of the tests reads; `make fuzz` reads more.
CASES = {"schema": 80, "manifest": 40, "index": 60, "report": 30}
CASES |= {"csv": 100, "json": 100, "parquet": 100}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TARGETS)
def test_damaged_inputs_are_taken_or_refused(tmp_path, name):
    previous = worker.signal.signal(worker.signal.SIGPROF, worker.on_time)
    watch = Watch(tmp_path)
    try:
        target = TARGETS[name](tmp_path)
        cases = range(-20, CASES[name] - 20)  # those of a worker's start, too
        found = {number: case(target, watch, 0, number) for number in cases}
    finally:
        worker.sys.meta_path.remove(watch)
        worker.signal.signal(worker.signal.SIGPROF, previous)
    assert {number: one for number, one in found.items() if one is not None} == {}
