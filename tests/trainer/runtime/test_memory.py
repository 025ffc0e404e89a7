# SPDX-License-Identifier: MIT
"""Tables that cannot fit are refused before they are allocated, with the bytes."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from embeddings.optimizer import SparseOptimizerConfig
from embeddings.schema.schema import Table
from tests.benchmarks.days import resident_bytes
from trainer.build import build_training
from trainer.plan import plan_config
from trainer.recipes import dlrm
from trainer.runtime import memory
from trainer.runtime.memory import available_bytes, check_tables, table_bytes
from trainer.runtime.runtime import Runtime

CPU = torch.device("cpu")
SMALL = Table(name="small", num_embeddings=10, embedding_dim=8)
HUGE = Table(name="huge", num_embeddings=10**12, embedding_dim=16)
ADAGRAD = SparseOptimizerConfig(kind="rowwise_adagrad")


@pytest.fixture
def runtime():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Runtime(rank=0, local_rank=0, world_size=1, local_world_size=1, device=CPU, seed=0)
    dist.destroy_process_group()


def test_the_bytes_of_a_table_include_its_optimizers_state():
    for kind, expected in (("rowwise_adagrad", 360), ("adagrad", 640), ("sgd", 320)):
        assert table_bytes(SMALL, SparseOptimizerConfig(kind=kind)) == expected


@pytest.mark.parametrize("rows", [10**12, 10**25])
def test_a_table_larger_than_memory_is_refused_with_bytes_needed_and_available(runtime, rows):
    huge = replace(HUGE, num_embeddings=rows)
    needed = f"{4 * rows * 17 + 360:,} bytes"
    with pytest.raises(ValueError, match=rf"they need {needed}.*'huge'.* lower its") as caught:
        check_tables([SMALL, huge], ADAGRAD, runtime)
    assert "are available" in str(caught.value)
    assert "\n" not in str(caught.value)
    check_tables([SMALL], ADAGRAD, runtime)


def test_a_plan_states_the_memory_that_tables_take_within_a_tenth(runtime):
    config = dlrm.globo_dynamic()
    sizes = {"user": 1_500_000, "article": 300_000}  # of one row each, and by id
    tables = [
        replace(table, num_embeddings=sizes.get(table.name, table.num_embeddings))
        for table in config.schema.tables
    ]
    assert [table.name for table in tables if table.dynamic] == ["article", "hist_article"]
    config = replace(config, schema=replace(config.schema, tables=tuple(tables)))
    build_training(dlrm.globo_dynamic(), runtime)  # what libraries keep of a first model
    before = resident_bytes()
    training = build_training(config, runtime)
    taken = resident_bytes() - before
    stated = sum(table.bytes_per_rank for table in plan_config(config, 1, 1, "cpu").tables)
    assert stated > 100 << 20
    assert taken == pytest.approx(stated, rel=0.1), (taken, stated)
    del training


def test_what_is_available_is_what_the_container_allows(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    free = available_bytes(CPU)
    assert free > 2**20
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(CPU) > 2**20
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    assert available_bytes(CPU) == 100_000
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert available_bytes(CPU) == 150_000
    monkeypatch.setattr(memory, "_MEMORY", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    7 kB\n")
    assert available_bytes(CPU) == 7 * 1024


@pytest.mark.dist
def test_ranks_share_the_tables_and_fail_together(processes):
    limit = table_bytes(SMALL, ADAGRAD)
    assert processes.run(_refusal, limit) == ["", ""]
    first, second = processes.run(_refusal, limit - 1)
    assert first == second
    assert f"360 on rank 0's machine, where {limit - 1} are available" in first


def _refusal(runtime: Runtime, limit: int) -> str:
    """Return why the small table does not fit where rank 0 has `limit` bytes."""
    memory.available_bytes = lambda _: limit if runtime.rank == 0 else 2 * limit
    try:
        check_tables([SMALL], ADAGRAD, runtime)
    except ValueError as error:
        return str(error)
    finally:
        memory.available_bytes = available_bytes
    return ""
