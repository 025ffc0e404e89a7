# SPDX-License-Identifier: MIT
"""Tokens: batched projections equal the loop over fields; histories pool right, empty to zeros."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from embeddings.collection import Embeddings
from embeddings.schema.schema import DenseFeature, Label, Schema, SparseFeature, Table
from models.fields import DenseExpansion, FieldProjection
from models.tokens import (
    FieldTokenizer,
    StreamTokenizer,
    TokenizerConfig,
)


def schema(**changes) -> Schema:
    values = {
        "tables": (
            Table(name="user", num_embeddings=10, embedding_dim=8),
            Table(name="item", num_embeddings=10, embedding_dim=4),
        ),
        "sparse": (
            SparseFeature(name="user", table="user"),
            SparseFeature(name="item", table="item", side="item"),
            SparseFeature(
                name="hist_item", table="item", kind="sequence", max_length=3, history="hist"
            ),
        ),
        "dense": (DenseFeature(name="price"),),
        "labels": (Label(name="click"),),
        "history_actions": {"hist": "hist_action"},
    }
    return Schema(**{**values, **changes})


def embeddings(lengths: list[int]) -> Embeddings:
    generator = torch.Generator().manual_seed(0)
    rows = JaggedTensor(
        values=torch.randn(sum(lengths), 4, generator=generator), lengths=torch.tensor(lengths)
    )
    return Embeddings(torch.randn(len(lengths), 12, generator=generator), {"hist_item": rows})


def test_one_batched_product_equals_a_projection_per_field():
    projection = FieldProjection([3, 5, 4], 6)
    torch.nn.init.normal_(projection.project.bias)
    x = torch.randn(7, 12)
    tokens = projection(x)
    for field, (start, width) in enumerate(((0, 3), (3, 5), (8, 4))):
        weight = projection.project.weight[field, :width]
        expected = x[:, start : start + width] @ weight + projection.project.bias[field].flatten()
        torch.testing.assert_close(tokens[:, field], expected)


def test_a_missing_number_reads_its_columns_own_vector():
    expansion = DenseExpansion((False, False), 4)
    torch.nn.init.normal_(expansion.missing)
    out = expansion(torch.tensor([[1.0, float("nan")]]))
    torch.testing.assert_close(out[0, 1], expansion.missing[1])
    torch.testing.assert_close(out[0, 0], expansion.weight[0] + expansion.bias[0])
    out.sum().backward()
    assert torch.isfinite(expansion.weight.grad).all()


def test_a_standardized_column_is_shifted_and_scaled_and_the_others_are_not():
    torch.manual_seed(0)
    expansion = DenseExpansion((True, False, True), 4)
    plain = DenseExpansion((False, False, False), 4)
    plain.load_state_dict(expansion.state_dict(), strict=False)
    x = torch.tensor([[7.0, 7.0, 7.0], [float("nan"), 1.0, 2.0]])
    torch.testing.assert_close(expansion(x), plain(x), msg="nothing is known yet")
    nothing = float("nan")
    expansion.standardize(torch.tensor([5.0, 5.0, nothing]), torch.tensor([2.0, 2.0, nothing]))
    expected = torch.tensor([[1.0, 7.0, 7.0], [nothing, 1.0, 2.0]])
    torch.testing.assert_close(expansion(x), plain(expected))
    assert {"mean", "std"} <= set(expansion.state_dict()), "a checkpoint keeps them"
    assert not {"mean", "std"} & set(plain.state_dict())


def test_fields_and_history_summaries_become_named_tokens():
    tokenizer = FieldTokenizer(schema(), TokenizerConfig(token_dim=6))
    assert tokenizer.token_names == (
        "user",
        "item",
        "price",
        "hist_mean",
        "hist_last",
        "hist_attention",
    )
    tokens = tokenizer(embeddings([2, 0, 3]), torch.zeros(3, 1), torch.zeros(5, dtype=torch.int64))
    assert tokens.shape == (3, tokenizer.num_tokens, 6)


def test_history_summaries_equal_their_definitions():
    tokenizer = FieldTokenizer(schema(), TokenizerConfig(token_dim=6))
    inputs = embeddings([2, 0, 3])
    tokens = tokenizer(inputs, torch.zeros(3, 1), torch.zeros(5, dtype=torch.int64))
    events = tokenizer.events[0].project(inputs.sequences["hist_item"].values())
    events = events + tokenizer.events[0].action.weight[0]
    torch.testing.assert_close(tokens[0, 3], events[:2].mean(0))
    torch.testing.assert_close(tokens[2, 4], events[4])
    query = tokenizer.pooling[0].query(inputs.pooled[:, 8:])
    scores = tokenizer.pooling[0].key(events[2:]) @ query[2] * 6**-0.5
    torch.testing.assert_close(tokens[2, 5], scores.softmax(0) @ events[2:])


def test_an_empty_history_gives_zeros_and_finite_gradients():
    tokenizer = FieldTokenizer(schema(), TokenizerConfig(token_dim=6))
    tokens = tokenizer(embeddings([0, 0]), torch.zeros(2, 1), torch.zeros(0, dtype=torch.int64))
    assert torch.equal(tokens[:, 3:], torch.zeros(2, 3, 6))
    tokens.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in tokenizer.parameters() if p.grad is not None)


def test_slices_cut_all_embeddings_into_equal_tokens():
    config = TokenizerConfig(token_dim=6, num_tokens=5, history_pooling=())
    tokenizer = FieldTokenizer(schema(), config)
    tokens = tokenizer(embeddings([1]), torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    assert tokens.shape == (1, 5, 6)
    with pytest.raises(ValueError, match="lower num_tokens"):
        FieldTokenizer(schema(), TokenizerConfig(num_tokens=999))


def test_a_stream_holds_context_fields_jagged_events_and_the_item():
    tokenizer = StreamTokenizer(schema(), TokenizerConfig(token_dim=6))
    actions = torch.tensor([1, 0, 1, 1, 0])
    stream = tokenizer(embeddings([2, 0, 3]), torch.zeros(3, 1), actions)
    assert tokenizer.token_names == ("user", "price")
    assert stream.fields.shape == (3, 2, 6)
    assert stream.events.shape == (5, 6)
    assert stream.offsets.tolist() == [0, 2, 2, 5]
    assert stream.actions is actions
    assert stream.targets.shape == (3, 1, 6)


def test_a_stream_without_item_or_history_has_a_learned_target_and_no_events():
    flat = schema(
        tables=(Table(name="user", num_embeddings=10, embedding_dim=8),),
        sparse=(SparseFeature(name="user", table="user"),),
        history_actions={},
    )
    tokenizer = StreamTokenizer(flat, TokenizerConfig(token_dim=6))
    stream = tokenizer(
        Embeddings(torch.randn(2, 8), {}), torch.zeros(2, 1), torch.zeros(0, dtype=torch.int64)
    )
    assert stream.events.shape == (0, 6)
    assert stream.offsets.tolist() == [0, 0, 0]
    assert stream.actions is None
    assert stream.targets.requires_grad


def test_two_histories_do_not_fit_one_stream():
    two = (
        *schema().sparse,
        SparseFeature(name="seen", table="item", kind="sequence", max_length=3, history="seen"),
    )
    with pytest.raises(ValueError, match="holds one history"):
        StreamTokenizer(schema(sparse=two), TokenizerConfig())


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [(FieldTokenizer, "a tower of fields needs at least one"), (StreamTokenizer, "a stream needs")],
)
def test_a_schema_of_sequences_alone_is_refused_in_the_words_of_its_tower(tokenizer, message):
    sequence = SparseFeature(
        name="clicks", table="item", kind="sequence", max_length=3, history="clicked"
    )
    lone = Schema(
        tables=(Table(name="item", num_embeddings=9, embedding_dim=4),),
        sparse=(sequence,),
        labels=(Label(name="click"),),
    )
    with pytest.raises(ValueError, match=message):
        tokenizer(lone, TokenizerConfig())


@pytest.mark.parametrize("kind", [FieldTokenizer, StreamTokenizer])
def test_dropped_fields_are_those_of_an_example_without_them_and_events_stay(kind):
    torch.manual_seed(0)
    tokenizer = kind(schema(), TokenizerConfig(token_dim=6, field_dropout_rates={"user": 0.5}))
    found = embeddings([2, 0, 3, 1] * 8)
    numbers, actions = torch.zeros(32, 1), torch.zeros(48, dtype=torch.int64)
    torch.manual_seed(1)
    dropped = tokenizer(found, numbers, actions)
    torch.manual_seed(1)
    kept = torch.rand(32, 2)[:, 0] >= 0.5
    pooled = found.pooled.clone()
    pooled[~kept, :8] = 0
    assert kept.any() and not kept.all()
    expected = tokenizer.eval()(Embeddings(pooled, found.sequences), numbers, actions)
    for one, other in zip(dropped, expected, strict=True):
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize(
    "settings",
    [{"field_dropout": 1.0}, {"field_dropout": -0.1}, {"field_dropout_rates": {"user": 1.5}}],
)
def test_impossible_dropout_is_refused(settings):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\)"):
        TokenizerConfig(**settings)


def test_an_unknown_field_to_drop_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"no sparse field 'usr'.*user"):
        FieldTokenizer(schema(), TokenizerConfig(field_dropout_rates={"usr": 0.5}))
