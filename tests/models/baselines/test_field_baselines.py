# SPDX-License-Identifier: MIT
"""DCNv2, GDCN, AutoInt, MaskNet and WuKong against their equations, in float64 loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from models.baselines.fields.autoint import AutoIntConfig
from models.baselines.fields.dcnv2 import DCNv2Config
from models.baselines.fields.gdcn import GDCNConfig
from models.baselines.fields.masknet import MaskNetConfig
from models.baselines.fields.wukong import WuKongConfig

B, T, D = 3, 4, 2
CONFIGS = {
    "dcnv2": DCNv2Config(num_cross_layers=2, hidden_units=(5, 3)),
    "dcnv2 low rank": DCNv2Config(num_cross_layers=2, rank=3, structure="crossnet"),
    "dcnv2 stacked": DCNv2Config(num_cross_layers=2, structure="stacked", hidden_units=(5,)),
    "gdcn": GDCNConfig(num_cross_layers=2, hidden_units=(5, 3)),
    "gdcn stacked": GDCNConfig(num_cross_layers=2, structure="stacked", hidden_units=(5,)),
    "autoint": AutoIntConfig(num_layers=2, num_heads=2, head_dim=3),
    "autoint+": AutoIntConfig(num_layers=1, num_heads=2, head_dim=3, scale=True, hidden_units=(5,)),
    "masknet": MaskNetConfig(block_units=(5, 3), reduction=0.5),
    "masknet parallel": MaskNetConfig(
        structure="parallel", block_units=(5, 3), reduction=2.0, hidden_units=(4,)
    ),
    "wukong": WuKongConfig(num_layers=2, num_fm=2, num_linear=3, rank=2, hidden_units=(5,)),
    "wukong of as many": WuKongConfig(
        num_layers=1, num_fm=1, num_linear=3, rank=2, hidden_units=(5,)
    ),
}


def deep(mlp: nn.Module, row: Tensor) -> Tensor:
    for linear in mlp.linears:  # type: ignore[union-attr]
        row = (linear.weight @ row + linear.bias).clamp(min=0)
    return row


def normed(norm: nn.LayerNorm, row: Tensor) -> Tensor:
    centred = row - row.mean()
    return centred / (centred.square().mean() + 1e-5).sqrt() * norm.weight + norm.bias


def dcnv2(tower: nn.Module, config: DCNv2Config, tokens: Tensor) -> Tensor:
    first = crossed = tokens.flatten()
    for cross in tower.crosses:
        low_rank = isinstance(cross, nn.Sequential)
        weight = cross[1].weight @ cross[0].weight if low_rank else cross.weight
        bias = cross[1].bias if low_rank else cross.bias
        crossed = first * (weight @ crossed + bias) + crossed
    if config.structure == "crossnet":
        return crossed
    if config.structure == "stacked":
        return deep(tower.deep, crossed)
    return torch.cat([crossed, deep(tower.deep, first)])


def gdcn(tower: nn.Module, config: GDCNConfig, tokens: Tensor) -> Tensor:
    first = crossed = tokens.flatten()
    for layer, bias in zip(tower.maps, tower.bias, strict=True):
        cross, gate = layer.weight[: T * D], layer.weight[T * D :]
        crossed = first * (cross @ crossed + bias) / (1 + torch.exp(-(gate @ crossed))) + crossed
    if config.structure == "stacked":
        return deep(tower.deep, crossed)
    return torch.cat([crossed, deep(tower.deep, first)])


def autoint(tower: nn.Module, config: AutoIntConfig, tokens: Tensor) -> Tensor:
    rows, width = list(tokens), config.head_dim
    for layer in tower.layers:
        made = []
        for field in rows:
            parts = []
            for head in range(config.num_heads):
                own = slice(head * width, (head + 1) * width)
                query = layer.query.weight[own] @ field
                logits = [float(query @ (layer.key.weight[own] @ other)) for other in rows]
                if config.scale:
                    logits = [logit / math.sqrt(width) for logit in logits]
                total = sum(math.exp(logit) for logit in logits)
                parts.append(
                    sum(
                        math.exp(logit) / total * (layer.value.weight[own] @ other)
                        for logit, other in zip(logits, rows, strict=True)
                    )
                )
            made.append((torch.cat(parts) + layer.residual.weight @ field).clamp(min=0))
        rows = made
    out = torch.cat(rows)
    return torch.cat([out, deep(tower.deep, tokens.flatten())]) if config.hidden_units else out


def masknet(tower: nn.Module, config: MaskNetConfig, tokens: Tensor) -> Tensor:
    embedding = tokens.flatten()

    def block(one: nn.Module, inputs: Tensor) -> Tensor:
        up, _, down = one.mask
        mask = down.weight @ (up.weight @ embedding + up.bias).clamp(min=0) + down.bias
        return normed(one.norm, one.linear.weight @ (mask * inputs)).clamp(min=0)

    inputs = torch.cat([normed(tower.norm, token) for token in tokens])
    if config.structure == "serial":
        for one in tower.blocks:
            inputs = block(one, inputs)
        return inputs
    return deep(tower.deep, torch.cat([block(one, inputs) for one in tower.blocks]))


def wukong(tower: nn.Module, config: WuKongConfig, tokens: Tensor) -> Tensor:
    for layer in tower.layers:
        machines = tokens @ tokens.T @ layer.columns  # X Xᵀ Y, not the optimized order
        hidden = deep(layer.fm_hidden, normed(layer.fm_norm, machines.flatten()))
        made = (layer.fm_output.weight @ hidden + layer.fm_output.bias).reshape(config.num_fm, D)
        kept = tokens if layer.residual is None else layer.residual @ tokens
        joined = torch.cat([made, layer.linear @ tokens]) + kept
        tokens = torch.stack([normed(layer.norm, row) for row in joined])
    return tokens.flatten()


DERIVATIONS: dict[str, Callable[..., Tensor]] = {
    "dcnv2": dcnv2,
    "gdcn": gdcn,
    "autoint": autoint,
    "masknet": masknet,
    "wukong": wukong,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    tower = CONFIGS[name].build(T, D).double()
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # no bias is zero, no gain is one
    return tower


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tower_computes_its_equations(name: str) -> None:
    tower = build(name)
    tokens = torch.randn(B, T, D, dtype=torch.float64)
    derive = DERIVATIONS[name.split()[0].rstrip("+")]
    with torch.no_grad():
        expected = torch.stack([derive(tower, CONFIGS[name], row) for row in tokens])
        torch.testing.assert_close(tower(tokens), expected, rtol=1e-10, atol=1e-10)
    assert expected.shape == (B, tower.output_dim)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_is_that_of_finite_differences(name: str) -> None:
    tower = build(name)
    tokens = torch.randn(2, T, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(tower, (tokens,))


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (DCNv2Config, {"num_cross_layers": 0}, "num_cross_layers must be at least 1"),
        (DCNv2Config, {"structure": "beside"}, "structure must be one of"),
        (DCNv2Config, {"hidden_units": ()}, "needs hidden_units"),
        (GDCNConfig, {"hidden_units": ()}, "hidden_units not empty"),
        (AutoIntConfig, {"num_heads": 0}, "must be at least 1"),
        (MaskNetConfig, {"block_units": ()}, "at least one positive width"),
        (MaskNetConfig, {"reduction": 0.0}, "above 0"),
        (MaskNetConfig, {"hidden_units": (8,)}, "have no effect"),
        (WuKongConfig, {"rank": 0}, "must be at least 1"),
    ],
)
def test_a_setting_that_cannot_be_built_is_an_error(config, values, message) -> None:
    with pytest.raises(ValueError, match=message):
        config(**values)
