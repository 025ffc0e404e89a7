# SPDX-License-Identifier: MIT
"""TokenFormer on input that does not fit, is extreme, or comes in half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from embeddings.collection import Embeddings
from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from models.stream import Stream
from models.tokens import FieldTokenizer, StreamTokenizer, TokenizerConfig
from models.towers.tokenformer import TokenFormer, TokenFormerConfig
from tests.support.derivation import randomize
from tests.support.streams import stream_of


def tower_of(**settings: Any) -> TokenFormer:
    defaults: dict[str, Any] = dict(windows=(6, 3), max_length=5, num_actions=4)
    tower = TokenFormerConfig(**defaults | settings).build(3, 8).double()
    randomize(tower, 0)
    return tower


def test_of_a_history_longer_than_max_length_the_newest_events_are_read() -> None:
    tower, stream = tower_of(), stream_of([9, 2])
    assert stream.actions is not None
    cut = stream._replace(
        events=stream.events[4:], actions=stream.actions[4:], offsets=torch.tensor([0, 5, 7])
    )
    assert torch.allclose(tower(stream), tower(cut), rtol=0, atol=1e-12)


def test_an_empty_history_is_scored_from_fields_and_target() -> None:
    tower, stream = tower_of(), stream_of([0, 3])
    out = tower(stream)
    assert bool(out.isfinite().all())
    for changed in (
        stream._replace(fields=stream.fields + 1),
        stream._replace(targets=stream.targets + 1),
    ):
        assert (tower(changed)[0] - out[0]).abs().max() > 1e-3
    moved = stream._replace(events=stream.events + 1)
    assert torch.allclose(tower(moved)[0], out[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["impression", "user_centric"])
def test_a_batch_of_no_examples_gives_no_outputs(mode: Any) -> None:
    tower, stream = tower_of(mode=mode), stream_of([3, 2])
    none = Stream(
        stream.fields[:0], stream.events[:0], torch.zeros(1, dtype=torch.int64),
        stream.actions[:0] if stream.actions is not None else None, stream.targets[:0],
    )  # fmt: skip
    out = tower(none)
    assert (out if mode == "impression" else out.targets).shape == (0, 1, 8)


STREAM = stream_of([3, 2])
ACTIONS = torch.tensor([0, 1, 2, 3, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fields": torch.zeros(2, 4, 8)}, r"built for fields of shape \(B, 3, 8\).*\(2, 4, 8\)"),
        ({"fields": torch.zeros(2, 3, 6)}, "built for fields"),
        ({"events": torch.zeros(5, 6)}, "events of width 8"),
        ({"targets": torch.zeros(2, 1, 6)}, r"expected targets of shape \(2, V, 8\)"),
        ({"targets": torch.zeros(3, 1, 8)}, r"expected targets of shape \(2, V, 8\)"),
        ({"offsets": torch.tensor([0, 3, 4, 5])}, "expected 3 offsets"),
        ({"offsets": torch.tensor([0, 3, 4])}, "rise from 0 to the number of events, 5"),
        ({"offsets": torch.tensor([0, 6, 5])}, "shortest history -1"),
        ({"offsets": torch.tensor([1, 3, 5])}, "rise from 0"),
        ({"actions": ACTIONS[:4]}, r"one action an event, \(5,\), got \(4,\)"),
        ({"actions": ACTIONS + 1}, "actions from 0 to 3, got 1 to 4"),
        ({"actions": ACTIONS - 1}, "got -1 to 2"),
        ({"actions": None}, "stream has no actions"),
        ({"fields": torch.zeros(2, 3, 8, dtype=torch.int64)}, "floating-point"),
    ],
)
def test_a_stream_that_does_not_fit_is_refused_in_words(
    change: dict[str, Tensor | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tower_of()(STREAM._replace(**change))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_vectors_of_half_precision_tables_are_widened(dtype: torch.dtype) -> None:
    tower, stream = tower_of().float(), stream_of([3, 0])
    half = stream._replace(
        fields=stream.fields.to(dtype),
        events=stream.events.to(dtype),
        targets=stream.targets.to(dtype),
    )
    wide = stream._replace(
        fields=half.fields.float(), events=half.events.float(), targets=half.targets.float()
    )
    half.events.requires_grad_()
    out = tower(half)
    assert out.dtype == torch.float32
    assert torch.equal(out, tower(wide))
    out.sum().backward()
    assert half.events.grad is not None and half.events.grad.dtype == dtype
    assert bool(half.events.grad.isfinite().all())


def uneven(lengths: list[int], other: list[int]) -> tuple[Schema, Embeddings]:
    sequence: dict[str, Any] = dict(kind="sequence", max_length=5, history="clicks")
    schema = Schema(
        tables=(Table(name="item", num_embeddings=10, embedding_dim=4),),
        sparse=(
            SparseFeature(name="user", table="item"),
            SparseFeature(name="clicked", table="item", **sequence),
            SparseFeature(name="shop", table="item", **sequence),
        ),
        labels=(Label(name="click"),),
    )
    sequences = {
        name: JaggedTensor(values=torch.randn(sum(sizes), 4), lengths=torch.tensor(sizes))
        for name, sizes in (("clicked", lengths), ("shop", other))
    }
    return schema, Embeddings(torch.randn(len(lengths), 4), sequences)


@pytest.mark.parametrize("tokenizer", [StreamTokenizer, FieldTokenizer])
def test_sequences_of_one_history_that_differ_in_length_are_refused(tokenizer: Any) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    schema, fitting = uneven([3, 2], [3, 2])
    tokenizer(schema, TokenizerConfig())(fitting, torch.zeros(2, 0), none)
    schema, embeddings = uneven([3, 2], [3, 1])
    with pytest.raises(ValueError, match="'clicked': 5, 'shop': 4"):
        tokenizer(schema, TokenizerConfig())(embeddings, torch.zeros(2, 0), none)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_tower_returns_what_it_returns_on_a_cpu(dtype: torch.dtype) -> None:
    config = TokenFormerConfig(windows=(32, 16), max_length=300, num_actions=4)
    tower = config.build(3, 64).float()
    stream = stream_of([300, 0, 1, 77], dim=64)
    stream = stream._replace(
        fields=stream.fields.float(), events=stream.events.float(), targets=stream.targets.float()
    )
    expected = tower(stream)
    on_gpu = Stream(*(part if part is None else part.cuda() for part in stream))
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        out = tower.cuda()(on_gpu).float().cpu()
    tolerance = 1e-2 if dtype == torch.float32 else 0.2
    assert (out - expected).abs().max() <= tolerance
