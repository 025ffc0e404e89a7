# SPDX-License-Identifier: MIT
"""TokenFormer: equal to a dense stream an example at a time, and its published properties."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention.attention import bfts_masks, bidirectional_static, causal_mask
from models.stream import Stream
from models.towers.interaction import InteractionBlock, rotate, rotation_table
from models.towers.tokenformer import TokenFormer, TokenFormerConfig, UserOutputs

DOUBLE = torch.float64
DIM = 8


def tower_of(num_fields: int = 3, **settings: Any) -> TokenFormer:
    defaults: dict[str, Any] = dict(num_heads=2, expansion=2, max_length=7, num_actions=4)
    tower = TokenFormerConfig(**defaults | settings).build(num_fields, DIM).double()
    with torch.no_grad():
        # Small starts would hide mistakes below the tolerances.
        tower.separator.normal_()
        if tower.actions is not None:
            tower.actions.normal_()
    return tower


def stream_of(
    lengths: list[int], num_fields: int = 3, num_targets: int = 1, actions: bool = True
) -> Stream:
    total = sum(lengths)
    return Stream(
        fields=torch.randn(len(lengths), num_fields, DIM, dtype=DOUBLE),
        events=torch.randn(total, DIM, dtype=DOUBLE),
        offsets=torch.tensor([0, *itertools.accumulate(lengths)]),
        actions=torch.randint(0, 4, (total,)) if actions else None,
        targets=torch.randn(len(lengths), num_targets, DIM, dtype=DOUBLE),
    )


def dense(tower: TokenFormer, stream: Stream, example: int, target: int) -> tuple[Tensor, Tensor]:
    """One example and one target as one dense stream: target output (D,), item outputs (n, D)."""
    config = tower.config
    first, last = stream.offsets[example : example + 2].tolist()
    first = max(first, last - config.max_length)
    n = last - first
    closing = config.mode == "impression"
    tokens, places, items = [*stream.fields[example], tower.separator[0]], [0] * 3 + [0], []
    shift = config.max_length - n if config.right_align else 0
    for t in range(n):
        items.append(len(tokens))
        tokens.append(stream.events[first + t])
        places.append(t + 1 + shift)
        if stream.actions is not None and tower.actions is not None:
            tokens.append(tower.actions[stream.actions[first + t]])
            places.append(t + 1 + shift)
    if closing:
        tokens.append(tower.separator[0])
        places.append(n + 1 + shift)
    tokens.append(stream.targets[example, target])
    places.append(config.max_length + 1 if closing or config.right_align else n + 1)
    x = torch.stack(tokens)[None]
    cos, sin = (
        part[torch.tensor(places)][None, :, None]
        for part in rotation_table(config.max_length + 2, DIM // config.num_heads, 1e4, x)
    )
    masks = bfts_masks(tower.num_fields, len(tokens), config.num_full_layers, config.windows)
    for block, mask in zip(tower.layers, masks, strict=True):
        if config.static_bidirectional:
            mask = bidirectional_static(mask, tower.num_fields)
        x = block(x, (cos, sin), mask)
    return x[0, -1], x[0, items]


LENGTHS = [4, 0, 1, 9, 7]


@pytest.mark.parametrize("mode", ["impression", "user_centric"])
@pytest.mark.parametrize("actions", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"windows": (6, 3)},
        {"windows": (32, 16)},
        {"windows": (2, 2)},
        {"num_layers": 2, "windows": ()},
        {"num_layers": 4, "num_full_layers": 1, "windows": (9, 5, 2)},
        {"num_layers": 4, "num_full_layers": 3, "windows": (4,)},
        {"windows": (6, 3), "static_bidirectional": True},
        {"windows": (6, 3), "right_align": True},
        {"windows": (6, 3), "gate": "none", "output_projection": "after_gate"},
        {"windows": (6, 3), "output_projection": "before_gate"},
    ],
)
def test_packed_and_pruned_tower_equals_dense_streams(
    mode: str, actions: bool, settings: dict[str, Any]
) -> None:
    tower = tower_of(mode=mode, num_actions=4 if actions else 0, **settings)
    stream = stream_of(LENGTHS, num_targets=2, actions=actions)
    out = tower(stream)
    targets = out.targets if isinstance(out, UserOutputs) else out
    items = []
    for b in range(len(LENGTHS)):
        first, history = dense(tower, stream, b, 0)
        second, _ = dense(tower, stream, b, 1)
        expected = torch.stack([first, second])
        assert torch.allclose(targets[b], expected, rtol=0, atol=1e-10), b
        items.append(history)
    if isinstance(out, UserOutputs):
        assert torch.allclose(out.items, torch.cat(items), rtol=0, atol=1e-10)
        kept = [e for e in range(sum(LENGTHS)) if e not in (5, 6)]
        assert out.events.tolist() == kept


@pytest.mark.parametrize("lengths", [[0], [0, 0], [1], [5, 5], [12]])
@pytest.mark.parametrize("mode", ["impression", "user_centric"])
def test_uniform_empty_and_overlong_histories(lengths: list[int], mode: str) -> None:
    tower = tower_of(mode=mode, windows=(6, 3))
    stream = stream_of(lengths)
    out = tower(stream)
    targets = out.targets if isinstance(out, UserOutputs) else out
    for b in range(len(lengths)):
        expected = dense(tower, stream, b, 0)[0]
        assert torch.allclose(targets[b, 0], expected, rtol=0, atol=1e-10)
    targets.sum().backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in tower.parameters())


def test_gradients_equal_those_of_dense_streams() -> None:
    tower = tower_of(windows=(6, 3))
    stream = stream_of(LENGTHS)
    inputs = (stream.fields, stream.events, stream.targets, *tower.parameters())
    for leaf in inputs[:3]:
        leaf.requires_grad_()
    weights = torch.randn(len(LENGTHS), DIM, dtype=DOUBLE)
    ours = torch.autograd.grad((tower(stream)[:, 0] * weights).sum(), inputs)
    rows = torch.stack([dense(tower, stream, b, 0)[0] for b in range(len(LENGTHS))])
    theirs = torch.autograd.grad((rows * weights).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-9)


def test_only_the_newest_events_are_read() -> None:
    tower = tower_of(windows=(6, 3))
    stream = stream_of([9])
    out = tower(stream)
    changed = stream.events.clone()
    changed[:2] += 1
    assert torch.allclose(tower(stream._replace(events=changed)), out, rtol=0, atol=1e-12)
    changed[2] += 1
    assert (tower(stream._replace(events=changed)) - out).abs().max() > 1e-3


def test_an_example_does_not_see_its_batch_mates() -> None:
    tower = tower_of()
    stream = stream_of([5, 0, 7])
    out = tower(stream)
    changed = stream._replace(events=stream.events.clone(), fields=stream.fields.clone())
    changed.events[:5] += 1
    changed.fields[0] += 1
    assert torch.allclose(tower(changed)[1:], out[1:], rtol=0, atol=1e-12)


def test_candidates_of_one_request_do_not_see_each_other() -> None:
    tower = tower_of()
    stream = stream_of([5, 2], num_targets=4)
    together = tower(stream)
    alone = [tower(stream._replace(targets=stream.targets[:, v : v + 1])) for v in range(4)]
    assert torch.allclose(together, torch.cat(alone, 1), rtol=0, atol=1e-10)
    # In a plain causal stream they would: appending them as one sequence changes the second.
    block = tower.layers[0]
    x = torch.randn(1, 6, DIM, dtype=DOUBLE)
    rotation = rotation_table(6, 4, 1e4, x)
    cos, sin = (part[None, :, None] for part in rotation)
    changed = x.clone()
    changed[:, 4] += 1
    mask = causal_mask(6)
    moved = block(changed, (cos, sin), mask)[:, 5] - block(x, (cos, sin), mask)[:, 5]
    assert moved.abs().max() > 1e-3


def test_scoring_against_an_encoded_user_equals_the_full_forward() -> None:
    tower = tower_of()
    stream = stream_of([5, 2], num_targets=3)
    context = tower.encode(stream._replace(targets=stream.targets[:, :0]))
    scores = [tower.score(context, stream.targets[:, v : v + 1]) for v in range(3)]
    assert torch.allclose(torch.cat(scores, 1), tower(stream), rtol=0, atol=1e-10)


def test_field_order_does_not_matter_when_fields_see_each_other() -> None:
    for bidirectional in (True, False):
        tower = tower_of(static_bidirectional=bidirectional)
        stream = stream_of([5, 0, 2])
        swapped = stream._replace(fields=stream.fields[:, [1, 0, 2]])
        gap = (tower(stream) - tower(swapped)).abs().max()
        assert gap < 1e-10 if bidirectional else gap > 1e-3


def test_no_item_output_sees_its_own_or_a_later_action() -> None:
    tower = tower_of(mode="user_centric", windows=(6, 3))
    stream = stream_of([6])
    out = tower(stream)
    assert stream.actions is not None
    for t in range(6):
        later = stream.actions.clone()
        later[t:] = (later[t:] + 1) % 4
        changed = tower(stream._replace(actions=later))
        seen, before = changed.items[: t + 1], out.items[: t + 1]
        assert torch.allclose(seen, before, rtol=0, atol=1e-12)
        # Earlier actions must matter, or the test shows nothing.
        if t < 5:
            assert (changed.items[t + 1] - out.items[t + 1]).abs().max() > 1e-3
        else:
            assert (changed.targets - out.targets).abs().max() > 1e-3


def test_target_sees_fields_through_the_full_layers_only() -> None:
    tower = tower_of(windows=(6, 3))
    stream = stream_of([5])
    moved = stream._replace(fields=stream.fields + 1)
    assert (tower(moved) - tower(stream)).abs().max() > 1e-3
    assert [past.key.shape[2] for past in tower.encode(stream).layers] == [15, 15, 5, 2]


def test_rotary_positions_keep_norms_and_depend_on_differences_only() -> None:
    x = torch.randn(1, 1, 8, dtype=DOUBLE)
    y = torch.randn(1, 1, 8, dtype=DOUBLE)
    table = rotation_table(30, 8, 1e4, x)

    def at(heads: Tensor, position: int) -> Tensor:
        return rotate(heads, (table[0][position], table[1][position]))

    assert torch.allclose((at(x, 0) * at(y, 0)).sum(), (x * y).sum(), rtol=0, atol=1e-12)
    assert torch.allclose(at(x, 7).norm(), x.norm(), rtol=1e-12)
    product = (at(x, 9) * at(y, 4)).sum()
    assert torch.allclose(product, (at(x, 25) * at(y, 20)).sum(), rtol=0, atol=1e-12)
    # Interleaved pairs are the half-split layout after a permutation.
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    pairs = x.view(1, 1, 4, 2)
    cos, sin = table[0][7], table[1][7]
    turned = torch.stack(
        [pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 0] * sin + pairs[..., 1] * cos], -1
    ).view(1, 1, 8)
    assert torch.allclose(at(x[..., order], 7), turned[..., order], rtol=0, atol=1e-12)


def waves(offset: int, rows: int, columns: int, scale: float = 0.5) -> Tensor:
    index = torch.arange(rows * columns, dtype=DOUBLE).view(rows, columns)
    return scale * torch.sin(index + offset)


@pytest.mark.parametrize(
    ("windows", "row", "total"),
    [
        ((), [1.0979435595, 1.0212755689, 0.0061315814, -1.0127751581], 4.1954271549),
        ((3,), [1.0854381467, 1.0185055088, 0.0152390506, -1.0020076329], 3.8847573995),
    ],
)
def test_vector_c_of_one_block(windows: tuple[int, ...], row: list[float], total: float) -> None:
    block = InteractionBlock(4, num_heads=1, hidden=6).double()
    # The vector pairs neighbouring coordinates; ours pairs halves.
    order = [0, 2, 1, 3]
    with torch.no_grad():
        key, value = waves(25, 4, 4)[:, order], waves(30, 4, 4)
        block.key_value.weight.copy_(torch.cat([key, value], 1).T)
        query, gate = waves(20, 4, 4)[:, order], waves(35, 4, 4)
        block.query_gate.weight.copy_(torch.cat([query, gate], 1).T)
        block.ffn.lift.weight.copy_(torch.cat([waves(50, 4, 6), waves(60, 4, 6)], 1).T)
        block.ffn.compress.weight.copy_(waves(70, 6, 4).T)
    x = waves(0, 6, 4, 1.0)[None]
    positions = torch.tensor([0, 0, 0, 1, 2, 7])
    cos, sin = (part[positions][None, :, None] for part in rotation_table(8, 4, 1e4, x))
    mask = bfts_masks(2, 6, 1 - len(windows), windows)[0]
    out = block(x, (cos, sin), mask)[0]
    assert int(mask.sum()) == (12 if windows else 21)
    assert torch.allclose(out[-1], torch.tensor(row, dtype=DOUBLE), rtol=0, atol=1e-8)
    assert abs(float(out.sum().detach()) - total) < 1e-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["impression", "user_centric"])
def test_half_precision_is_finite_and_near_full_precision(dtype: torch.dtype, mode: str) -> None:
    tower = tower_of(mode=mode, windows=(6, 3)).float()
    stream = stream_of(LENGTHS)
    stream = stream._replace(
        fields=stream.fields.float(), events=stream.events.float(), targets=stream.targets.float()
    )
    exact = tower(stream)
    with torch.autocast("cpu", dtype=dtype):
        out = tower(stream)
    pairs = list(zip(out, exact, strict=True)) if mode == "user_centric" else [(out, exact)]
    for ours, expected in pairs:
        assert (ours.float() - expected.float()).abs().max() < 0.2
    floating = [ours.float().sum() for ours, _ in pairs if ours.is_floating_point()]
    torch.stack(floating).sum().backward()
    for name, parameter in tower.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


def test_gate_starts_as_asked() -> None:
    zero = tower_of(gate="zero").layers[0]
    assert isinstance(zero, InteractionBlock)
    gate = zero.queries_gate(torch.randn(3, DIM, dtype=DOUBLE), (torch.ones(2), torch.zeros(2)))[1]
    assert gate is not None and torch.equal(gate, torch.full((3, DIM), 0.5, dtype=DOUBLE))
    assert tower_of(gate="none").layers[0].query_gate.weight.shape == (DIM, DIM)  # pyright: ignore


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"windows": (32,)}, "expected 2"),
        ({"num_full_layers": 0, "windows": (9, 8, 7, 6)}, "num_full_layers"),
        ({"windows": (8, 1)}, "counts the token itself"),
        ({"max_length": 0}, "max_length"),
        ({"mode": "users"}, "mode must be one of"),
    ],
)
def test_settings_without_effect_or_meaning_are_errors(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TokenFormerConfig(**settings)


def test_streams_and_sizes_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ValueError, match="multiple of 2"):
        TokenFormerConfig(num_heads=4).build(3, 12)
    tower = tower_of()
    with pytest.raises(ValueError, match="stream has no actions"):
        tower(stream_of([2], actions=False))
    with pytest.raises(ValueError, match="stream has actions"):
        tower_of(num_actions=0)(stream_of([2]))
    with pytest.raises(ValueError, match="built for fields"):
        tower(stream_of([2], num_fields=4))


def test_a_user_of_one_field_and_an_empty_request_is_scored() -> None:
    tower = tower_of(num_fields=1)
    stream = stream_of([0], num_fields=1, num_targets=0)
    assert tower(stream).shape == (1, 0, DIM)


def test_parameters_all_get_gradients_even_without_any_history() -> None:
    tower = tower_of()
    tower(stream_of([0, 0])).square().sum().backward()
    for name, parameter in tower.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
