# SPDX-License-Identifier: MIT
"""RankElastor against an independent float64 derivation, in both forms and every structure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.baselines.tokens.rankmixer import RankMixerConfig, RankMixerLayer, mix_tokens
from models.diagnostics.rank import effective_rank, singular_values, stable_rank
from models.layers import PerTokenGLU, PerTokenLinear, PerTokenRMSNorm
from models.towers.rankelastor import (
    PaperBlock,
    RankElastor,
    RankElastorConfig,
    ReleasedBlock,
    ResidualMixing,
    block_transpose_order,
)
from tests.support.derivation import (
    Array,
    array,
    check_gradients,
    close,
    gelu,
    layer_norm,
    randomize,
    rms_norm,
)

DOUBLE = torch.float64
RMS_EPS = 1e-12
STRUCTURES: dict[str, dict[str, Any]] = {
    "full": {},
    "one matrix for all coordinates": {"mixing_block": 4},
    "blocks": {"mixing_block": 2},
    "sum of products": {"mixing_terms": 3},
    "low rank": {"mixing_rank": 2},
    "low rank of blocks": {"mixing_block": 2, "mixing_rank": 2},
}


def whole_matrix(mixing: ResidualMixing) -> Array:
    """W as a (T·D, T·D) matrix."""
    weight = array(mixing.weight)
    if mixing.terms:
        left = array(mixing.left)
        products = [np.kron(left[:, :, k], weight[k]) for k in range(mixing.terms)]
        return np.array(products).sum(0)
    if mixing.left is not None:
        weight = array(mixing.left) @ weight
    return np.asarray(np.kron(weight, np.eye(mixing.block)), dtype=np.float64)


def glu_of(x: Array, glu: PerTokenGLU, t: int) -> Array:
    lift, bias, h = array(glu.lift.weight)[t], array(glu.lift.bias), glu.hidden
    lifted = x @ lift + (bias[t] if bias.ndim else 0)
    gate = gelu(lifted[:h]) + (lifted[2 * h :] if glu.extra_gate else 0)
    return linear_of(gate * lifted[h : 2 * h], glu.compress, t) + linear_of(x, glu.residual, t)


def linear_of(x: Array, linear: PerTokenLinear, t: int) -> Array:
    bias = array(linear.bias)
    return x @ array(linear.weight)[t] + (bias[t] if bias.ndim else 0)


def block_of(x: Array, block: PaperBlock | ReleasedBlock) -> Array:
    """One example (T, D) through one block."""
    flat, mixing = x.reshape(-1), block.mixing
    if isinstance(block, PaperBlock):
        mixed = (flat + whole_matrix(mixing) @ flat).reshape(x.shape)
        rows = [layer_norm(row, block.norm) for row in mixed]
        return np.stack([glu_of(row, block.ffn, t) for t, row in enumerate(rows)])
    assert isinstance(mixing.norm, torch.nn.RMSNorm)
    normed = rms_norm(flat, array(mixing.norm.weight), RMS_EPS)
    mixed = (flat + whole_matrix(mixing) @ normed + array(mixing.bias)).reshape(x.shape)
    out = []
    for t, row in enumerate(mixed):
        row = rms_norm(row, array(block.norm.weight), RMS_EPS)
        hidden = row
        for layer in block.ffn.layers:
            if isinstance(layer, PerTokenRMSNorm):
                hidden = rms_norm(hidden, array(layer.gain)[t, 0], RMS_EPS)
            elif isinstance(layer, PerTokenGLU):
                hidden = glu_of(hidden, layer, t)
            else:
                assert isinstance(layer, PerTokenLinear)
                hidden = linear_of(hidden, layer, t)
        out.append(hidden + row)
    return np.stack(out)


def tower_of(x: Array, tower: RankElastor) -> Array:
    out = []
    for example in x:
        for block in tower.blocks:
            assert isinstance(block, PaperBlock | ReleasedBlock)
            example = block_of(example, block)
        out.append(example.mean(0) if tower.pooling == "mean" else example.reshape(-1))
    return np.stack(out)


@st.composite
def cases(draw: st.DrawFn) -> tuple[RankElastorConfig, torch.Tensor, int]:
    tokens, dim = draw(st.integers(1, 4)), draw(st.sampled_from([4, 8]))
    variant: Any = draw(st.sampled_from(["paper", "code"]))
    units = st.lists(st.integers(1, 6), max_size=2).map(tuple)
    config = RankElastorConfig(
        variant=variant,
        depth=draw(st.integers(1, 2)),
        expansion=draw(st.sampled_from([0.75, 1.0, 3.0])),
        hidden_units=draw(units) if variant == "code" else (),
        pooling=draw(st.sampled_from(["mean", "flatten"])),
        **STRUCTURES[draw(st.sampled_from(list(STRUCTURES)))],
    )
    seed = draw(st.integers(0, 2**31))
    size = (draw(st.integers(1, 3)), tokens, dim)
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** draw(st.integers(-2, 2))
    return config, torch.randn(size, dtype=DOUBLE, generator=generator) * scale, seed


@settings(max_examples=200, deadline=None)
@given(cases())
def test_towers_equal_the_derivation(case: tuple[RankElastorConfig, torch.Tensor, int]) -> None:
    config, tokens, seed = case
    tower = config.build(*tokens.shape[1:]).double()
    randomize(tower, seed)
    assert close(tower(tokens), tower_of(array(tokens), tower))


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_a_block_of_the_released_size_equals_the_derivation(variant: Any) -> None:
    units = (64, 64) if variant == "code" else ()
    config = RankElastorConfig(variant=variant, depth=1, hidden_units=units, pooling="flatten")
    tower = config.build(26, 30).double()
    randomize(tower, 0, std=0.05)
    tokens = torch.randn(2, 26, 30, dtype=DOUBLE)
    assert close(tower(tokens), tower_of(array(tokens), tower), tolerance=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES.keys())
@pytest.mark.parametrize("variant", ["paper", "code"])
def test_gradients_of_inputs_and_weights_equal_finite_differences(
    variant: Any, structure: dict[str, Any]
) -> None:
    units = (3,) if variant == "code" else ()
    tower = RankElastorConfig(
        variant=variant, depth=1, expansion=1, hidden_units=units, **structure
    ).build(2, 4)
    randomize(tower.double(), 1)
    check_gradients(tower, lambda x: (x,), torch.randn(2, 2, 4, dtype=DOUBLE))


@pytest.mark.parametrize(("tokens", "dim"), [(1, 5), (2, 6), (3, 6), (4, 16), (6, 6)])
def test_block_transpose_is_a_commutation_matrix_and_an_involution(tokens: int, dim: int) -> None:
    commutation = torch.zeros(tokens**2, tokens**2, dtype=DOUBLE)
    for head in range(tokens):
        for token in range(tokens):
            commutation[head * tokens + token, token * tokens + head] = 1
    matrix = torch.kron(commutation, torch.eye(dim // tokens, dtype=DOUBLE))
    size = tokens * dim
    assert torch.equal(torch.eye(size, dtype=DOUBLE)[block_transpose_order(tokens, dim)], matrix)
    assert torch.equal(matrix @ matrix, torch.eye(size, dtype=DOUBLE))
    assert int(matrix.trace()) == dim
    x = torch.randn(2, tokens, dim, dtype=DOUBLE)
    assert torch.equal(mix_tokens(x).flatten(1), x.flatten(1) @ matrix.T)


def test_rankmixer_layers_are_the_special_case_of_a_commutation_matrix() -> None:
    rankmixer = RankMixerConfig(num_layers=1).build(4, 8).double()
    layer = rankmixer.layers[0]
    assert isinstance(layer, RankMixerLayer)
    for block in (1, 2):
        config = RankElastorConfig(mixing_init="commutation", mixing_block=block)
        paper = PaperBlock(config, 4, 8).double()
        x = torch.randn(3, 4, 8, dtype=DOUBLE)
        mixed = layer.mixing_norm(mix_tokens(x) + x)
        assert torch.allclose(paper.norm(paper.mixing(x)), mixed, rtol=0, atol=1e-12)


def test_the_released_mixing_is_rankmixers_only_at_unit_root_mean_square() -> None:
    config = RankElastorConfig(variant="code", mixing_init="commutation")
    mixing = ResidualMixing(config, 3, 6, released=True).double()
    x = torch.randn(64, 3, 6, dtype=DOUBLE)
    assert (mixing(x) - x - mix_tokens(x)).abs().max() > 0.4
    x = x / x.flatten(1).square().mean(1).sqrt()[:, None, None]
    assert (mixing(x) - x - mix_tokens(x)).abs().max() < 2e-12


def test_the_released_gated_unit_without_its_extra_branch_is_the_papers() -> None:
    paper = PerTokenGLU(26, 30, 90).double()
    code = PerTokenGLU(26, 30, 90, bias=True, extra_gate=True).double()
    x = torch.randn(26, 5, 30, dtype=DOUBLE)
    with torch.no_grad():
        code.lift.weight[..., :180] = paper.lift.weight
        code.compress.weight.copy_(paper.compress.weight)
        code.residual.weight.copy_(paper.residual.weight)
        assert (code(x) - paper(x)).abs().max() > 0.1
        code.lift.weight[..., 180:] = 0
    assert torch.allclose(code(x), paper(x), rtol=0, atol=1e-12)


def reach(matrix: torch.Tensor, tokens: int, dim: int) -> set[int]:
    """How many tokens of the output each token of the input reaches, one block of full mixing."""
    tower = RankElastorConfig(depth=1).build(tokens, dim).double()
    block = tower.blocks[0]
    assert isinstance(block, PaperBlock)
    with torch.no_grad():
        block.mixing.weight.copy_(matrix)
    x = torch.randn(1, tokens, dim, dtype=DOUBLE)
    jacobian = torch.autograd.functional.jacobian(lambda x: block(x)[0], x)
    assert isinstance(jacobian, torch.Tensor)
    touched = jacobian[:, :, 0].abs().amax((1, 3)) > 1e-12
    return set(touched.sum(0).tolist())


def test_structured_mixers_reach_every_token_and_the_releases_fast_ones_do_not() -> None:
    tokens, dim = 24, 4
    per_token, everyone = torch.randn(dim, dim).double(), torch.randn(tokens, tokens).double()
    one_by_one = torch.kron(torch.eye(tokens, dtype=DOUBLE), per_token)
    assert reach(one_by_one, tokens, dim) == {1}
    half = torch.kron(torch.eye(2, dtype=DOUBLE), torch.randn(12, 12).double())
    assert reach(torch.kron(half, per_token), tokens, dim) == {12}
    assert reach(torch.kron(everyone, torch.eye(dim, dtype=DOUBLE)), tokens, dim) == {tokens}
    for structure in STRUCTURES.values():
        mixing = ResidualMixing(RankElastorConfig(**structure), tokens, dim).double()
        assert reach(torch.from_numpy(whole_matrix(mixing)), tokens, dim) == {tokens}


def test_stable_rank_is_below_entropy_rank_in_2000_random_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((15, 26), (26, 30), (16, 24), (24, 64)):
        x = torch.randn(500, rows, columns, dtype=DOUBLE, generator=generator)
        # Spectra of every steepness, as collapsed representations have them.
        steepness = torch.linspace(0, 3, 500, dtype=DOUBLE)[:, None]
        x = x * torch.arange(1, columns + 1, dtype=DOUBLE).pow(-steepness)[:, None]
        sigma = singular_values(x)
        stable, entropy = stable_rank(sigma), effective_rank(sigma)
        assert bool((stable <= entropy + 1e-9).all())
        assert bool((entropy <= min(rows, columns) + 1e-9).all())
        assert float(entropy.min()) < 0.5 * float(entropy.max())
