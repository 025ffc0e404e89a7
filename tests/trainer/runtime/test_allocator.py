# SPDX-License-Identifier: MIT
"""What keeps a step's memory: on glibc it takes effect, elsewhere it is left alone and named."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.runtime import allocator, probes
from trainer.runtime.allocator import keep_memory
from trainer.runtime.runtime import RuntimeConfig

GLIBC = platform.libc_ver()[0] == "glibc"
needs_glibc = pytest.mark.skipif(not GLIBC, reason="the C library is not glibc")
# Steps of blocks of 1 to 48 MB, three alive at a time, as activations of ragged batches are.
STEPS = """
import json, random, resource, sys
import psutil, torch
from trainer.runtime.runtime import RuntimeConfig, start
runtime = start(RuntimeConfig(device="cpu", allocator=sys.argv[1]))
random.seed(0)
process, resident, alive = psutil.Process(), [], []
def steps(count):
    for _ in range(count):
        alive.append(torch.empty(random.randrange(1 << 18, 12 << 20)))
        alive[-1][::1024] = 1.0  # every page
        del alive[:-3]
steps(100)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    steps(100)
    resident.append(process.memory_info().rss)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps({"faults": faults, "resident": resident}))
"""


class Library(SimpleNamespace):
    """A C library whose mallopt records what it was told."""

    def __init__(self, answer: int = 1, **more: Any) -> None:
        super().__init__(told={}, gnu_get_libc_version=bytes, **more)
        self.answer = answer

    def mallopt(self, parameter: int, value: int) -> int:
        self.told[parameter] = value
        return self.answer


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the process's own record alone."""
    monkeypatch.setattr(allocator, "_kept", False)


def test_glibc_maps_no_block_on_its_own_and_keeps_what_is_freed() -> None:
    library = Library()
    assert keep_memory({}, library)[0]
    assert library.told == {-4: 0, -1: 2**31 - 1, -2: 64 << 20}
    assert allocator.is_kept()


@pytest.mark.parametrize(
    ("environment", "library", "reason"),
    [
        ({}, SimpleNamespace(), "is not glibc"),
        ({}, Library(mallctl=int), "jemalloc is loaded"),
        ({}, Library(MallocExtension_ReleaseFreeMemory=int), "tcmalloc is loaded"),
        ({}, Library(mi_version=int), "mimalloc is loaded"),
        ({}, Library(answer=0), "glibc refuses to set MALLOC_MMAP_MAX_"),
        ({"MALLOC_TOP_PAD_": "1"}, Library(), "environment's own.*: MALLOC_TOP_PAD_"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, Library(), "own.*: GLIBC_TUNABLES"),
    ],
    ids=["musl", "jemalloc", "tcmalloc", "mimalloc", "refused", "variable", "tunable"],
)
def test_any_other_allocator_is_left_alone_and_named(
    environment: dict[str, str], library: Any, reason: str
) -> None:
    kept, line = keep_memory(environment, library)
    assert not kept and not allocator.is_kept()
    assert re.search(reason, line)
    assert not getattr(library, "told", {}) or library.answer == 0


def test_other_tunables_do_not_count() -> None:
    assert keep_memory({"GLIBC_TUNABLES": "glibc.rtld.nns=3"}, Library())[0]


def test_the_doctor_names_what_is_in_use() -> None:
    answer = probes.answer("allocator", probes.PROBES["allocator"])
    assert answer["state"] == "ok"
    assert "glibc" in answer["detail"] or "in place of" in answer["detail"]


def test_an_unknown_allocator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"runtime\.allocator: expected 'keep' or 'system'"):
        RuntimeConfig(allocator="jemalloc")  # pyright: ignore[reportArgumentType]


@needs_glibc
def test_kept_memory_is_used_again_and_does_not_grow() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    found = {}
    for kind in allocator.ALLOCATORS:
        command = [sys.executable, "-c", STEPS, kind]
        out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found[kind] = json.loads(out.stdout)
    # New pages are touched again and again by one, hardly ever by the other.
    assert found["keep"]["faults"] < 0.05 * found["system"]["faults"]
    first, *_, last = found["keep"]["resident"]
    assert last < first + (64 << 20)
