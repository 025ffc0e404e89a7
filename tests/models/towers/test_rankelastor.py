# SPDX-License-Identifier: MIT
"""RankElastor: published vectors and counts, and RankMixer as the special case it generalises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.layers import PerTokenGLU, PerTokenLinear
from models.towers.rankelastor import (
    PaperBlock,
    RankElastorConfig,
    ReleasedBlock,
    ResidualMixing,
    block_transpose_order,
)

DOUBLE = torch.float64


def waves(offset: int, rows: int, columns: int) -> Tensor:
    index = torch.arange(rows * columns, dtype=DOUBLE).view(rows, columns)
    return 0.3 * torch.sin(index + offset)


def per_token(offset: int, rows: int, columns: int) -> Tensor:
    return torch.stack([waves(offset + t, rows, columns) for t in range(2)])


VECTOR_B = torch.tensor([[[1.0, -2, 0.5], [0.25, 3, -1]]], dtype=DOUBLE)


def set_vector_b(block: PaperBlock | ReleasedBlock, glu: PerTokenGLU) -> None:
    with torch.no_grad():
        block.mixing.weight.copy_(waves(1, 6, 6))
        glu.lift.weight.zero_()
        glu.lift.weight[..., :6] = per_token(2, 3, 6)
        glu.lift.weight[..., 6:12] = per_token(5, 3, 6)
        glu.compress.weight.copy_(per_token(8, 6, 3))
        glu.residual.weight.copy_(per_token(11, 3, 3))


def test_vector_b_of_the_paper_form() -> None:
    block = PaperBlock(RankElastorConfig(expansion=2), 2, 3).double()
    set_vector_b(block, block.ffn)
    mixed = torch.tensor(
        [[0.860775326, -1.402133968, 0.541358642], [-0.4669236819, 1.3895245118, -0.9226008299]],
        dtype=DOUBLE,
    )
    out = torch.tensor(
        [
            [-0.8310576741, -0.5340820487, 0.2539261493],
            [0.5540614897, -0.2203863019, -0.7922119439],
        ],
        dtype=DOUBLE,
    )
    assert torch.allclose(block.norm(block.mixing(VECTOR_B))[0], mixed, rtol=0, atol=1e-9)
    assert torch.allclose(block(VECTOR_B)[0], out, rtol=0, atol=1e-9)


def test_vector_b_of_the_released_form() -> None:
    block = ReleasedBlock(RankElastorConfig(variant="code", expansion=2), 2, 3).double()
    glu, final = block.ffn.layers[1], block.ffn.layers[2]
    assert isinstance(glu, PerTokenGLU) and isinstance(final, PerTokenLinear)
    set_vector_b(block, glu)
    with torch.no_grad():
        final.weight.copy_(torch.eye(3).expand(2, 3, 3))
    mixed = torch.tensor(
        [[0.195228712, -1.718491029, -0.0931361], [-0.1758123602, 1.5604057852, -0.7309061495]],
        dtype=DOUBLE,
    )
    out = torch.tensor(
        [[-0.3366714971, -2.0503402086, 0.0801663553], [0.325190089, 1.3722650923, -1.4352142992]],
        dtype=DOUBLE,
    )
    assert torch.allclose(block.norm(block.mixing(VECTOR_B))[0], mixed, rtol=0, atol=1e-9)
    assert torch.allclose(block(VECTOR_B)[0], out, rtol=0, atol=1e-9)


def test_block_transpose_is_the_published_permutation_and_its_own_inverse() -> None:
    order = [0, 1, 6, 7, 12, 13, 2, 3, 8, 9, 14, 15, 4, 5, 10, 11, 16, 17]
    assert block_transpose_order(3, 6).tolist() == order
    weight = torch.eye(18)[block_transpose_order(3, 6)]
    assert torch.equal(weight @ weight, torch.eye(18))
    assert int(weight.trace()) == 6


def test_block_mixing_is_a_kronecker_product_and_low_rank_a_product() -> None:
    tokens = torch.randn(4, 3, 6, dtype=DOUBLE)
    mixing = ResidualMixing(RankElastorConfig(mixing_block=2), 3, 6).double()
    full = torch.kron(mixing.weight.detach(), torch.eye(2, dtype=DOUBLE))
    expected = tokens + (tokens.flatten(1) @ full.T).view(4, 3, 6)
    assert torch.allclose(mixing(tokens), expected)
    mixing = ResidualMixing(RankElastorConfig(mixing_rank=4), 3, 6).double()
    assert mixing.left is not None
    full = mixing.left @ mixing.weight
    assert full.shape == (18, 18)
    expected = tokens + (tokens.flatten(1) @ full.T).view(4, 3, 6)
    assert torch.allclose(mixing(tokens), expected)


@pytest.mark.parametrize(
    "settings", [{}, {"mixing_rank": 2}, {"mixing_block": 2}, {"mixing_terms": 2}]
)
def test_zero_start_does_not_mix_and_still_learns(settings: dict[str, Any]) -> None:
    mixing = ResidualMixing(RankElastorConfig(mixing_init="zero", **settings), 3, 6)
    tokens = torch.randn(4, 3, 6)
    assert torch.equal(mixing(tokens), tokens)
    mixing(tokens).square().sum().backward()
    first = mixing.weight if mixing.left is None else mixing.left
    assert first.grad is not None and first.grad.abs().max() > 0


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_one_token_reaches_all_tokens_through_mixing_and_none_without(variant: Any) -> None:
    cases: list[tuple[Any, int]] = [("xavier", 5), ("zero", 1)]
    for init, reach in cases:
        tower = RankElastorConfig(variant=variant, depth=1, mixing_init=init).build(5, 6).double()
        jacobian = torch.autograd.functional.jacobian(
            lambda x, tower=tower: tower.blocks[0](x)[0], torch.randn(1, 5, 6, dtype=DOUBLE)
        )
        assert isinstance(jacobian, Tensor)
        touched = jacobian[:, :, 0, 2].abs().amax((1, 2)) > 1e-12
        assert int(touched.sum()) == reach


def test_parameter_counts_of_the_released_configurations() -> None:
    def count(module: torch.nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    config = RankElastorConfig(variant="code", hidden_units=(64, 64), pooling="flatten")
    block = ReleasedBlock(config, 26, 30)
    assert count(block) == 2_430_250
    assert count(block.mixing) == 609_960 and count(block.ffn) == 1_820_260
    # The whole released model at T=15, D=26: tokenizer, one block, head.
    one = RankElastorConfig(variant="code", hidden_units=(64, 64), pooling="flatten", depth=1)
    tower = one.build(15, 26)
    tokenizer = 390 + (26 * 500 + 500) + 500 + (500 * 26 + 26)
    head = (390 * 780 + 780) + (780 + 1)
    assert tower.output_dim == 390
    assert tokenizer + count(tower) + head == 1_484_093
    # The paper's gated unit: (3 r + 1) D² weights a token.
    assert count(PaperBlock(RankElastorConfig(), 15, 26).ffn) == 15 * 10 * 26**2


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_block_gradient_equals_finite_differences(variant: Any) -> None:
    tower = RankElastorConfig(variant=variant, depth=1, expansion=1).build(2, 3).double()
    tokens = torch.randn(2, 2, 3, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(tower, (tokens,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["paper", "code"])
def test_half_precision_is_finite_and_near_full_precision(variant: Any, dtype: torch.dtype) -> None:
    tower = RankElastorConfig(
        variant=variant, hidden_units=(8,) if variant == "code" else ()
    ).build(4, 8)
    tokens = torch.randn(16, 4, 8)
    exact = tower(tokens)
    with torch.autocast("cpu", dtype=dtype):
        out = tower(tokens)
    out.float().sum().backward()
    assert (out.float() - exact).abs().max() < 0.2
    for name, parameter in tower.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


def test_an_example_does_not_see_its_batch_mates() -> None:
    tower = RankElastorConfig(pooling="flatten").build(4, 8)
    tokens = torch.randn(6, 4, 8)
    alone = torch.cat([tower(one[None]) for one in tokens])
    assert tower.output_dim == 32 and torch.allclose(tower(tokens), alone, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 0}, "depth"),
        ({"variant": "released"}, "variant must be one of paper, code"),
        ({"hidden_units": (64,)}, "hidden_units is read by"),
        ({"mixing_rank": 4, "mixing_init": "commutation"}, "cannot be factored"),
    ],
)
def test_settings_without_effect_or_meaning_are_errors(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RankElastorConfig(**settings)


def test_sizes_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ValueError, match="must divide the token width"):
        RankElastorConfig(mixing_block=4).build(3, 6)
    with pytest.raises(ValueError, match="commutation"):
        RankElastorConfig(mixing_init="commutation").build(15, 26)
