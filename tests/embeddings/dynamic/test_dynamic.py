# SPDX-License-Identifier: MIT
"""Dynamic tables without ranks: who gets a row, who loses it, and what a row then holds."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.collection import EmbeddingLayer
from embeddings.dynamic.buckets import Layout, mix64, num_buckets, owners, shard_rows
from embeddings.dynamic.dynamic import Part, draw_vectors, dynamic_parts
from embeddings.dynamic.idmap import TOTALS, IdMap
from embeddings.optimizer import SparseOptimizerConfig, fuse_optimizer
from embeddings.schema.lifetime import MISSING_ID, WAYS, DynamicConfig
from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from trainer.data import hashing

CPU = torch.device("cpu")


def a_map(rows: int = 256, **settings: object) -> IdMap:
    return IdMap(rows, DynamicConfig(**settings), CPU)  # type: ignore[arg-type]


def feed(table: IdMap, ids: Sequence[int] | Tensor, day: int = 0) -> Tensor:
    table.day = day
    return table.train_rows(torch.as_tensor(ids))


def totals(table: IdMap) -> dict[str, int]:
    return dict(zip(TOTALS, table.totals.tolist(), strict=True))


def held(table: IdMap) -> set[int]:
    return set(table.ids[table.ids != MISSING_ID].tolist())


def layer(config: DynamicConfig, rows: int = 64, shared: bool = True) -> EmbeddingLayer:
    """A dynamic table read by a single id, a bag and a sequence."""
    features = [SparseFeature(name="id", table="item")]
    if shared:
        features += [
            SparseFeature(name="bag", table="item", kind="bag", max_length=9),
            SparseFeature(name="seq", table="item", kind="sequence", max_length=9, history="h"),
        ]
    schema = Schema(
        tables=(Table(name="item", num_embeddings=rows, embedding_dim=8, dynamic=config),),
        sparse=tuple(features),
        labels=(Label(name="click"),),
    )
    return EmbeddingLayer(schema, seed=3)


def part_of(model: EmbeddingLayer) -> Part:
    (part,) = dynamic_parts(model)
    return part


def batch(
    ids: Sequence[int], bag: Sequence[int] = (), seq: Sequence[int] = ()
) -> KeyedJaggedTensor:
    """One example per id; the first has the bag and the sequence."""
    rest = [0] * (len(ids) - 1)
    return KeyedJaggedTensor(
        keys=["id", "bag", "seq"],
        values=torch.tensor([*ids, *bag, *seq]),
        lengths=torch.tensor([*[1] * len(ids), len(bag), *rest, len(seq), *rest]),
    )


def step(model: EmbeddingLayer, features: KeyedJaggedTensor) -> Tensor:
    """Train on a sum of everything and return the pooled vectors."""
    out = model(features)
    loss = out.pooled.sum() + sum(rows.values().sum() for rows in out.sequences.values())
    loss.backward()
    return out.pooled.detach()


def test_an_id_has_a_row_of_its_own_from_its_first_occurrence_and_keeps_it() -> None:
    table = a_map()
    ids = torch.tensor([7, -3, 0, 2**62, 7, MISSING_ID])
    rows = feed(table, ids)
    assert rows[0] == rows[4] and rows[5] == 0
    assert len(set(rows[:4].tolist())) == 4 and rows[:4].min() > 0
    assert torch.equal(feed(table, ids), rows) and torch.equal(table.lookup(ids), rows)
    assert totals(table) == {
        **dict.fromkeys(TOTALS, 0),
        **{"ids": 12, "hits": 5, "missing": 2, "admitted": 4},
    }


def test_a_table_takes_nearly_as_many_ids_as_it_has_rows_before_one_has_to_leave() -> None:
    table = a_map(65_536)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-(2**63) + 1, 2**63 - 1, (55_700,), generator=generator)  # 85 %
    for part in ids.split(1000):
        feed(table, part)
    assert totals(table)["evicted"] < 0.004 * len(ids) and totals(table)["failed"] == 0
    assert table.occupancy()[0] == len(ids) - totals(table)["evicted"]


def test_ten_times_the_ids_take_no_more_memory() -> None:
    model = layer(DynamicConfig(min_occurrences=2, eviction="ttl", ttl_days=2), shared=False)
    fuse_optimizer(model, SparseOptimizerConfig())

    def held_after(first: int, last: int) -> int:
        for number in range(first, last):
            model.set_day(100 + number // 5)
            ids = torch.arange(40 * number, 40 * number + 40) // 2 * 2  # each twice
            model(batch(ids.tolist())).pooled.sum().backward()
        gc.collect()
        return sum(each.nbytes for each in gc.get_objects() if type(each) is Tensor)

    once = held_after(0, 10)
    assert once >= 64 * 8 * 4 and held_after(10, 100) == once
    counts = totals(part_of(model).map)
    assert counts["admitted"] == 100 * 20 and counts["evicted"] + counts["expired"] > 1_900


def test_two_ids_never_share_a_row_however_full_the_table_is() -> None:
    table = a_map(64)
    for seed in range(50):
        ids = torch.randint(0, 500, (40,), generator=torch.Generator().manual_seed(seed))
        rows = feed(table, ids)
        own = table.ids[rows]
        assert ((own == ids) | (own == MISSING_ID)).all()
        assert torch.unique(table.ids[table.ids != MISSING_ID]).numel() == table.occupancy()[0]
    assert totals(table)["evicted"] > 0


def test_ids_without_room_read_the_shared_row_and_are_counted() -> None:
    table = a_map(64, eviction="none")
    rows = feed(table, torch.arange(1, 500))
    in_use, limit = table.occupancy()
    assert totals(table)["failed"] == 499 - in_use and in_use > 0.7 * limit
    shared = set(table.layout.default_rows(CPU).tolist())
    assert set(rows[table.ids[rows] == MISSING_ID].tolist()) <= shared
    assert 0 not in shared


def test_ids_of_one_batch_do_not_push_each_other_out() -> None:
    table = a_map(64, eviction="lru")
    rows = feed(table, torch.arange(1, 500))
    assert totals(table)["evicted"] == 0 and totals(table)["failed"] > 400
    assert torch.equal(table.lookup(torch.arange(1, 500)), rows)


def test_an_id_waits_for_its_second_and_third_occurrence_over_batches_and_in_one() -> None:
    table = a_map(min_occurrences=3)
    assert not len(held(table)) and feed(table, [5, 6, 5]).unique().numel() <= 2
    assert held(table) == set()
    feed(table, [5, 8, 8, 8])
    assert held(table) == {5, 8}
    assert totals(table)["waiting"] == 3 and totals(table)["admitted"] == 2
    feed(table, [6])
    assert held(table) == {5, 8}
    feed(table, [6])
    assert held(table) == {5, 6, 8}
    assert table.hits[table.lookup(torch.tensor([6]))].item() == 3


def test_occurrences_are_counted_exactly_for_as_many_ids_as_the_table_has_rows() -> None:
    table = a_map(1024, min_occurrences=2)
    ids = torch.arange(1, 700) * 64
    feed(table, ids)
    assert held(table) == set()
    feed(table, ids)
    assert len(held(table)) >= 695


def test_a_share_of_ids_is_admitted_by_probability_the_same_in_every_run() -> None:
    tables = [a_map(65_536, admission="probability", probability=0.25) for _ in range(2)]
    ids = torch.arange(1, 20_001)
    for table in tables:
        feed(table, ids)
    assert held(tables[0]) == held(tables[1])
    assert 0.23 < len(held(tables[0])) / len(ids) < 0.27
    feed(tables[0], ids)
    assert 0.42 < len(held(tables[0])) / len(ids) < 0.455


def test_the_longest_unseen_id_leaves_under_lru_and_the_rarest_under_lfu() -> None:
    for eviction, stays in (("lru", 2), ("lfu", 1)):
        table = a_map(16, eviction=eviction)
        _, limit = table.occupancy()
        first = [1] * 9
        feed(table, first)
        others = range(2, limit + 1)
        for one in others:
            feed(table, [one] * (2 if one > 2 else 3))
        assert held(table) == set(range(1, limit + 1))
        feed(table, [100])
        gone = set(range(1, limit + 1)) - held(table)
        assert gone == ({1} if eviction == "lru" else {3}), eviction
        assert stays in held(table)


def test_what_was_frequent_once_leaves_by_days_where_the_rarest_leaves_first() -> None:
    table, forever = a_map(16, eviction="lfu", ttl_days=2), a_map(16, eviction="lfu")
    for one in (table, forever):
        feed(one, [1] * 100, day=100)
        for day in range(101, 104):
            feed(one, [day, day, day], day=day)
    assert held(table) == {101, 102, 103} and held(forever) == {1, 101, 102, 103}


def test_ids_leave_when_the_log_has_not_shown_them_for_more_than_ttl_days() -> None:
    table = a_map(eviction="ttl", ttl_days=2)
    feed(table, [1, 2], day=100)
    feed(table, [2, 3], day=101)
    feed(table, [3], day=102)
    assert held(table) == {1, 2, 3}
    feed(table, [4], day=103)
    assert held(table) == {2, 3, 4} and totals(table)["expired"] == 1
    # A run of an earlier day lets go of nothing that later days have shown.
    feed(table, [5], day=50)
    assert held(table) == {2, 3, 4, 5}


def test_ids_leave_by_the_day_of_a_second_pass_over_the_log_too_with_or_without_a_resume() -> None:
    table, resumed = a_map(eviction="ttl", ttl_days=2), a_map(eviction="ttl", ttl_days=2)
    for day in [*range(100, 110), *range(100, 110)]:
        feed(table, [2 * day, 2 * day + 1], day=day)
        feed(resumed, [2 * day, 2 * day + 1], day=day)
        if day == 107:
            resumed.load_state_dict({**resumed.state_dict()})
            resumed.validate_state()
    # Of the days before 107 the second pass has let go; what it has not reached again stays.
    assert (
        held(table)
        == held(resumed)
        == {id for day in (107, 108, 109) for id in (2 * day, 2 * day + 1)}
    )
    far = a_map(eviction="ttl", ttl_days=1)
    for day in (100, 47_000, 101, 102, 103, 104):
        feed(far, [day], day=day)
    assert held(far) == {103, 104, 47_000}, "one wrong day does not end expiry"


def test_ids_leave_after_ttl_steps_where_a_log_has_no_time() -> None:
    table = a_map(eviction="ttl", ttl_steps=16)
    feed(table, [1])
    for _ in range(16):
        feed(table, [2])
    assert held(table) == {1, 2}
    feed(table, [2])
    assert held(table) == {2}


def test_a_table_grows_by_eighths_and_evicts_only_at_its_limit() -> None:
    table = a_map(1024, initial_rows=200)
    used = []
    for first in range(0, 960, 40):
        feed(table, torch.arange(first, first + 40) + 10**6)
        if totals(table)["evicted"] == 0:
            used.append(int(table.seen[table.layout.default_rows(CPU)].sum()))
    buckets = num_buckets(1024)
    assert used[0] == 2 * buckets and used == sorted(used) and used[-1] > 6 * buckets
    assert table.occupancy()[0] > 0.85 * 1024
    assert int(table.seen[table.layout.default_rows(CPU)].max()) == WAYS


def test_evaluation_looks_up_and_changes_nothing() -> None:
    model = layer(DynamicConfig(min_occurrences=2))
    for _ in range(2):
        step(model, batch([1, 2, 3], bag=[1, 4], seq=[2, 5]))
    known = model(batch([1, 2, 3]))
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    counted = part_of(model).map.totals.clone()
    with torch.no_grad():
        unseen = model(batch([77, 78, MISSING_ID], bag=[79], seq=[80])).pooled
        again = model(batch([1, 2, 3])).pooled
    assert torch.isfinite(unseen).all() and (unseen[0, :8] != 0).any()
    assert torch.equal(again[:, :8], known.pooled[:, :8])
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(part_of(model).map.totals, counted)


def test_a_new_id_starts_from_its_own_vector_without_the_state_of_the_row_before_it() -> None:
    model = layer(DynamicConfig(), rows=16)
    fuse_optimizer(model, SparseOptimizerConfig(learning_rate=0.5))
    _, limit = part_of(model).map.occupancy()
    for one in range(1, limit + 1):
        step(model, batch([one], bag=[one], seq=[one]))
    part = part_of(model)
    assert (part.states[0][part.map.ids != MISSING_ID] > 0).all()
    fresh = model(batch([100], bag=[100], seq=[100]))
    part = part_of(model)
    assert totals(part.map)["evicted"] == 1
    row = part.map.lookup(torch.tensor([100]))
    expected = draw_vectors(torch.tensor([100]), part.table, 3)
    assert torch.equal(fresh.pooled[:, :8], expected) and expected.abs().min() > 0
    assert torch.equal(fresh.sequences["seq"].values(), expected)
    assert part.states[0][row].item() == 0
    gone = (set(range(1, limit + 1)) - held(part.map)).pop()
    again = model(batch([gone])).pooled[:, :8]
    assert torch.equal(again, draw_vectors(torch.tensor([gone]), part.table, 3))


def test_rows_of_ids_that_left_hold_zeros_and_no_state() -> None:
    model = layer(DynamicConfig(eviction="ttl", ttl_days=1))
    fuse_optimizer(model, SparseOptimizerConfig(learning_rate=0.5))
    model.set_day(10)
    step(model, batch([1, 2]))
    rows = part_of(model).map.lookup(torch.tensor([1, 2]))
    model.set_day(12)
    step(model, batch([3, 3]))
    part = part_of(model)
    assert held(part.map) == {3}
    left = rows[part.map.ids[rows] == MISSING_ID]
    assert len(left) and not part.weight[left].any() and not part.states[0][left].any()


def test_vectors_are_drawn_from_a_normal_distribution_that_seed_and_table_name_choose() -> None:
    table = Table(name="a", num_embeddings=64, embedding_dim=8, init_std=0.3)
    other = Table(name="b", num_embeddings=64, embedding_dim=8, init_std=0.3)
    ids = torch.arange(20_000)
    drawn = draw_vectors(ids, table, 1)
    assert abs(drawn.std().item() - 0.3) < 0.005 and abs(drawn.mean().item()) < 0.005
    assert abs((drawn.abs() < 0.3).float().mean().item() - 0.6827) < 0.005
    assert abs(torch.corrcoef(drawn.T).fill_diagonal_(0)).max() < 0.04
    assert not torch.equal(drawn, draw_vectors(ids, table, 2))
    assert not torch.equal(drawn, draw_vectors(ids, other, 1))


def test_ids_are_mixed_as_the_loader_mixes_them() -> None:
    ids = torch.tensor([0, 1, -1, 2**63 - 1, MISSING_ID, 123456789])
    expected = hashing.mix64(ids.numpy()).view("int64")
    assert torch.equal(mix64(ids), torch.from_numpy(expected))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("stride", [1, 8, 1024, 720_720])
def test_ids_with_a_pattern_spread_evenly_over_ranks_and_buckets(
    world_size: int, stride: int
) -> None:
    rows = 131_072
    ids = torch.arange(1, 100_001) * stride * world_size
    counts = torch.bincount(owners(ids, num_buckets(rows), world_size), minlength=world_size)
    assert counts.max() <= 1.1 * len(ids) / world_size
    assert counts.min() >= 0.9 * len(ids) / world_size


@pytest.mark.parametrize("rows", [16, 64, 1000, 65_537])
def test_ranks_cut_a_table_between_buckets_and_agree_on_who_holds_an_id(rows: int) -> None:
    for world_size in range(1, min(5, num_buckets(rows) + 1)):
        bounds = shard_rows(rows, world_size)
        assert bounds[0][0] == 0 and sum(size for _, size in bounds) == rows
        ids = torch.cat([torch.arange(-500, 500), torch.tensor([MISSING_ID])])
        rank = owners(ids, num_buckets(rows), world_size)
        assert rank[-1] == 0
        table = a_map(rows)
        for number, (first, size) in enumerate(bounds):
            part = table.rebuild_with_output_id_range((first, first + size), [])
            assert torch.equal(part.layout.holds(ids[:-1]), rank[:-1] == number)
            places = part.layout.places(ids[:-1][rank[:-1] == number])
            assert places.rows.min() >= 0 and places.rows.max() < size


def test_every_row_but_the_shared_ones_can_be_taken() -> None:
    layout = Layout(num_embeddings=1000, first_bucket=0, last_bucket=num_buckets(1000))
    places = layout.places(torch.arange(100_000))
    reached = places.rows.unique()
    assert len(reached) == layout.num_id_rows == 1000 - num_buckets(1000) - 1
    assert 0 not in reached and not set(layout.default_rows(CPU).tolist()) & set(reached.tolist())


def test_another_maps_ids_are_taken_over_the_latest_first() -> None:
    old = a_map(256)
    for day, first in enumerate((0, 100)):
        feed(old, torch.arange(first + 1, first + 101), day=day)
    bigger, smaller = a_map(1000), a_map(128)
    found, rows = bigger.take_over(old.slots)
    assert held(bigger) == held(old) and totals(bigger)["evicted"] == 0
    assert torch.equal(bigger.ids[rows], old.ids[found])
    assert torch.equal(bigger.seen[rows], old.seen[found])
    smaller.take_over(old.slots)
    kept = held(smaller)
    assert totals(smaller)["evicted"] == len(held(old)) - len(kept) > 0
    assert sum(one > 100 for one in kept) > 3 * sum(one <= 100 for one in kept)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"admission": "often"}, "admission: expected 'occurrences' or"),
        ({"eviction": "fifo"}, "eviction: expected 'lru'"),
        ({"admission": "probability"}, "probability: expected a number between 0 and 1"),
        ({"probability": 0.5}, "has no effect on admission 'occurrences'"),
        (
            {"admission": "probability", "probability": 0.5, "min_occurrences": 2},
            "has no effect on admission 'probability'",
        ),
        ({"min_occurrences": 0}, "min_occurrences: expected an integer in"),
        ({"ttl_days": 3}, "ttl_days: has no effect on eviction 'lru'"),
        ({"eviction": "ttl"}, "goes by ttl_days \\(of the log\\) or ttl_steps"),
        ({"eviction": "ttl", "ttl_days": 1, "ttl_steps": 1}, "one of the two"),
        ({"eviction": "lfu", "ttl_days": 1, "ttl_steps": 1}, "one of the two"),
        ({"eviction": "ttl", "ttl_days": 40_000}, r"in \[0, 3,650\], got 40,000; to keep .* 'lru'"),
        ({"eviction": "ttl", "ttl_steps": -1}, "ttl_steps: expected an integer in"),
        ({"initial_rows": -1}, "initial_rows: expected at least 0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicConfig(**settings)  # type: ignore[arg-type]


def test_a_table_that_is_too_small_or_begins_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="table 't': a dynamic table needs num_embeddings of at"):
        Table(name="t", num_embeddings=8, embedding_dim=4, dynamic=DynamicConfig())
    with pytest.raises(ValueError, match="initial_rows: expected less than num_embeddings"):
        Table(name="t", num_embeddings=64, embedding_dim=4, dynamic=DynamicConfig(initial_rows=64))
