# SPDX-License-Identifier: MIT
"""RankElastor: settings that cannot be, tokens that do not fit, empty and half-precision ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.towers.rankelastor import RankElastorConfig, ResidualMixing


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixing_block": 0}, "mixing_block must be at least 1"),
        ({"mixing_rank": -1}, "mixing_rank must be at least 0"),
        ({"mixing_terms": -1}, "mixing_terms is positive"),
        ({"mixing_terms": 2, "mixing_rank": 2}, "one structure at a time"),
        ({"mixing_terms": 2, "mixing_block": 2}, "one structure at a time"),
        ({"mixing_terms": 2, "mixing_init": "commutation"}, "cannot be factored"),
        ({"expansion": 0.0}, "expansion and hidden_units must be positive"),
        ({"variant": "code", "hidden_units": (0,)}, "expansion and hidden_units must be positive"),
    ],
)
def test_structures_that_cannot_be_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankElastorConfig(**settings)


def test_sizes_that_no_mixing_or_unit_has_are_errors() -> None:
    with pytest.raises(ValueError, match="cannot exceed the matrix it factors, 18 rows"):
        RankElastorConfig(mixing_rank=19).build(3, 6)
    with pytest.raises(ValueError, match="needs tokens, got 0 of width 6"):
        RankElastorConfig().build(0, 6)
    with pytest.raises(ValueError, match="expansion that is too small"):
        RankElastorConfig(expansion=0.1).build(3, 4)


@pytest.mark.parametrize("shape", [(2, 4, 6), (2, 3, 5), (2, 18), (3, 6)])
def test_tokens_of_another_schema_are_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"built for tokens of shape \(B, 3, 6\), got") as error:
        RankElastorConfig().build(3, 6)(torch.randn(shape))
    assert str(shape) in str(error.value)


def test_ids_in_place_of_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="ids become vectors in the tables"):
        RankElastorConfig().build(3, 6)(torch.ones(2, 3, 6, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["paper", "code"])
def test_half_precision_tokens_are_read_in_single_precision(
    variant: Any, dtype: torch.dtype
) -> None:
    tower = RankElastorConfig(variant=variant).build(3, 6)
    tokens = torch.randn(4, 3, 6).to(dtype).requires_grad_()
    out = tower(tokens)
    assert out.dtype == torch.float32
    assert torch.equal(out, tower(tokens.detach().float()))
    out.sum().backward()
    assert tokens.grad is not None and tokens.grad.dtype == dtype


def test_structures_cost_as_many_weights_as_they_say() -> None:
    sizes = {
        name: sum(p.numel() for p in ResidualMixing(config, 24, 64).parameters())
        for name, config in (
            ("full", RankElastorConfig()),
            ("tokens", RankElastorConfig(mixing_block=64)),
            ("terms", RankElastorConfig(mixing_terms=3)),
            ("rank", RankElastorConfig(mixing_rank=16)),
        )
    }
    assert sizes == {
        "full": (24 * 64) ** 2,
        "tokens": 24**2,
        "terms": 3 * (24**2 + 64**2),
        "rank": 2 * 16 * 24 * 64,
    }


def test_a_sum_of_products_starts_with_the_variance_of_a_xavier_matrix() -> None:
    mixing = ResidualMixing(RankElastorConfig(mixing_terms=4), 24, 32)
    assert mixing.left is not None
    whole = torch.einsum("otk,kde->odte", mixing.left.detach(), mixing.weight.detach())
    assert abs(float(whole.std()) * (24 * 32) ** 0.5 - 1) < 0.1


# A LayerNorm multiplies the gradient of a row of zeros by eps^-1/2 = 316 a block. Mixing leaves no
# such row unless it starts from zero; there float16, whose largest number is 65,504, overflows.
@pytest.mark.parametrize(
    ("variant", "init", "largest"),
    [
        ("paper", "xavier", 100),
        ("paper", "zero", 1e6),
        ("code", "xavier", 100),
        ("code", "zero", 100),
    ],
)
def test_tokens_of_an_empty_history_have_bounded_gradients(
    variant: Any, init: Any, largest: float
) -> None:
    units = (8, 6) if variant == "code" else ()
    tower = RankElastorConfig(variant=variant, mixing_init=init, hidden_units=units).build(4, 8)
    tokens = torch.randn(3, 4, 8)
    tokens[0, 2:] = 0
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype in dtypes[: 2 if largest > 65_504 else 3]:
        leaf = tokens.clone().requires_grad_()
        tower.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            out = tower(leaf)
        out.float().sum().backward()
        assert bool(out.isfinite().all()) and leaf.grad is not None
        for gradient in (leaf.grad, *(parameter.grad for parameter in tower.parameters())):
            assert gradient is not None and float(gradient.abs().max()) < largest


def test_an_example_of_zeros_alone_is_finite_in_the_released_form() -> None:
    tower = RankElastorConfig(variant="code", hidden_units=(8, 6)).build(4, 8)
    tokens = torch.zeros(3, 4, 8, requires_grad=True)
    tower(tokens).sum().backward()
    for gradient in (tokens.grad, *(parameter.grad for parameter in tower.parameters())):
        assert gradient is not None and bool(gradient.isfinite().all())
