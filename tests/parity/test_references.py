# SPDX-License-Identifier: MIT
"""Towers against FuxiCTR's and DeepCTR-Torch's modules with the same weights: `make parity`.

Both packages lie in a folder of their own, which that command fills and puts on the path. Where it
is not there, these tests are skipped. Numbers of parameters outside the tables are equal, but for
those that a test names. FuxiCTR's package holds no MaskNet and no GDCN.

Shapes: B examples, T fields, D width of a field's vector, L events.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.baselines.fields.autoint import AutoIntConfig
from models.baselines.fields.dcn import DCNConfig
from models.baselines.fields.dcnv2 import DCNv2Config
from models.baselines.fields.deepfm import DeepFMConfig
from models.baselines.fields.finalmlp import FinalMLPConfig
from models.baselines.fields.fm import FMConfig
from models.baselines.fields.wide_deep import WideDeepConfig
from models.baselines.fields.xdeepfm import XDeepFMConfig
from models.baselines.sequences.din import DINConfig
from models.heads import HeadConfig
from models.stream import Stream
from models.tower import Tower
from tests.support.derivation import randomize

B, T, D = 6, 5, 4
TOLERANCE = 1e-5


def installed(module: str) -> Any:
    return pytest.importorskip(module, reason="make parity installs it", exc_type=ImportError)


def prepared(reference: nn.Module) -> nn.Module:
    randomize(reference, 1, 0.3)
    return reference.eval()


def tokens_of(seed: int = 0) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed))


def copy_linears(ours: Any, theirs: nn.Module) -> None:
    """Copy the linear layers of their perceptron into ours, in order."""
    linears = [one for one in theirs.modules() if isinstance(one, nn.Linear)]
    for mine, one in zip(ours, linears, strict=True):
        mine.load_state_dict(one.state_dict())


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def size(*modules: nn.Module) -> int:
    return sum(one.numel() for module in modules for one in module.parameters())


def test_dcnv2() -> None:
    layers = installed("fuxictr.pytorch.layers")
    crosses = prepared(layers.CrossNetV2(T * D, 3))
    deep = prepared(layers.MLP_Block(T * D, hidden_units=[7, 6]))
    tower = DCNv2Config(num_cross_layers=3, hidden_units=(7, 6)).build(T, D)
    copy_linears(tower.crosses, crosses)
    copy_linears(tower.deep.linears, deep)
    flat = tokens_of().flatten(1)
    close(tower(tokens_of()), torch.cat([crosses(flat), deep(flat)], 1))
    assert size(tower) == size(crosses, deep)


def test_dcn() -> None:
    layers = installed("fuxictr.pytorch.layers")
    crosses = prepared(layers.CrossNet(T * D, 3))
    deep = prepared(layers.MLP_Block(T * D, hidden_units=[7]))
    tower = DCNConfig(num_cross_layers=3, hidden_units=(7,)).build(T, D)
    with torch.no_grad():
        for index, one in enumerate(crosses.cross_net):
            tower.weight[index] = one.weight.weight[0]
            tower.bias[index] = one.bias
    copy_linears(tower.deep.linears, deep)
    flat = tokens_of().flatten(1)
    close(tower(tokens_of()), torch.cat([crosses(flat), deep(flat)], 1))
    assert size(tower) == size(crosses, deep)


def test_autoint() -> None:
    layer = installed("deepctr_torch.layers.interaction").InteractingLayer
    for scale in (False, True):
        theirs = prepared(nn.Sequential(*(layer(D, head_num=2, scaling=scale) for _ in range(3))))
        tower = AutoIntConfig(num_layers=3, num_heads=2, head_dim=D // 2, scale=scale).build(T, D)
        for mine, one in zip(tower.layers, theirs, strict=True):
            names = {"query": one.W_Query, "key": one.W_key, "value": one.W_Value}
            weights = {f"{key}.weight": value.mT for key, value in names.items()}
            mine.load_state_dict(weights | {"residual.weight": one.W_Res.mT})
        close(tower(tokens_of()), theirs(tokens_of()).flatten(1))
        assert size(tower) == size(theirs)


def whole(name: str, tower: Tower, **settings: Any) -> None:
    """Compare probabilities of a whole DeepCTR-Torch model with first-order weights."""
    models, inputs = installed("deepctr_torch.models"), installed("deepctr_torch.inputs")
    columns = [inputs.SparseFeat(f"f{i}", 11, embedding_dim=D) for i in range(T)]
    theirs: Any = prepared(getattr(models, name)(columns, columns, **settings))
    ids = torch.randint(0, 11, (B, T), generator=torch.Generator().manual_seed(2))
    first = [theirs.linear_model.embedding_dict[f"f{i}"](ids[:, i]) for i in range(T)]
    vectors = [theirs.embedding_dict[f"f{i}"](ids[:, i]) for i in range(T)]
    tokens = torch.stack([torch.cat(one, 1) for one in zip(first, vectors, strict=True)], 1)
    head = HeadConfig(hidden_units=()).build(tower.output_dim, 1)
    copied, parts = [theirs.out], [torch.ones(1, 1)]  # the head's factor on first orders
    with torch.no_grad():
        if hasattr(theirs, "cin"):
            for mine, one in zip(tower.cin, theirs.cin.conv1ds, strict=True):
                mine.weight.copy_(one.weight[..., 0])
                mine.bias.copy_(one.bias)
            parts.append(theirs.cin_linear.weight)
            copied += [theirs.cin, theirs.cin_linear]
        if hasattr(theirs, "dnn"):
            copy_linears(tower.deep.linears, theirs.dnn)
            parts.append(theirs.dnn_linear.weight)
            copied += [theirs.dnn, theirs.dnn_linear]
        head.logits.weight.copy_(torch.cat(parts, 1))
        head.logits.bias.copy_(theirs.out.bias)
        close(head(tower(tokens)).sigmoid(), theirs(ids.float()))
    assert size(tower, head) == size(*copied) + 1  # that factor


def test_fm() -> None:
    whole("DeepFM", FMConfig().build(T, D + 1), dnn_hidden_units=())


def test_wide_and_deep() -> None:
    whole("WDL", WideDeepConfig(hidden_units=(7, 6)).build(T, D + 1), dnn_hidden_units=(7, 6))


def test_deepfm() -> None:
    whole("DeepFM", DeepFMConfig(hidden_units=(7, 6)).build(T, D + 1), dnn_hidden_units=(7, 6))


def test_xdeepfm() -> None:
    config = XDeepFMConfig(cin_units=(4, 3), bias=True, hidden_units=(7, 6))
    cin = {"cin_layer_size": (4, 3), "cin_split_half": False, "cin_activation": "linear"}
    whole("xDeepFM", config.build(T, D + 1), dnn_hidden_units=(7, 6), **cin)


def test_finalmlp() -> None:
    layers = installed("fuxictr.pytorch.layers")
    theirs = installed("model_zoo.LongCTR.FinalMLP.FinalMLP")
    select = prepared(theirs.FeatureSelection(None, T * D, D, [3]))
    perceptrons = [prepared(layers.MLP_Block(T * D, hidden_units=[7, width])) for width in (4, 6)]
    join = prepared(theirs.InteractionAggregation(4, 6, output_dim=1, num_heads=2))
    config = FinalMLPConfig(
        hidden_units1=(7, 4), hidden_units2=(7, 6), num_heads=2, gate_units=(3,)
    )
    tower: Any = config.build(T, D)
    head = HeadConfig(hidden_units=()).build(tower.output_dim, 1)
    with torch.no_grad():
        gates = ((tower.gate1, select.fs1_gate), (tower.gate2, select.fs2_gate))
        for (mine, one), start in zip(
            gates, (select.fs1_ctx_bias, select.fs2_ctx_bias), strict=True
        ):
            mine.learned.copy_(start)
            copy_linears([*mine.hidden.linears, mine.output], one)
        for mine, one in zip((tower.first, tower.second), perceptrons, strict=True):
            copy_linears(mine.linears, one)
        tower.bilinear.copy_(join.w_xy.view(2, 2, 3))
        weights = [join.w_x.weight, join.w_y.weight, torch.ones(1, 1)]
        head.logits.weight.copy_(torch.cat(weights, 1))
        head.logits.bias.copy_(join.w_x.bias + join.w_y.bias)
        flat = tokens_of().flatten(1)
        first, second = select(None, flat)
        expected = join(perceptrons[0](first), perceptrons[1](second))
        close(head(tower(tokens_of())), expected)
    # Their streams have a bias each, ours one together, and a factor on the bilinear forms.
    assert size(tower, head) == size(select, *perceptrons, join) - 1 + 1


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_din_with_dice(training: bool) -> None:
    layers = installed("fuxictr.pytorch.layers")
    unit = prepared(layers.DIN_Attention(D, [7, 5], "Dice"))
    dices = [layers.Dice(width) for width in (8, 3)]
    deep = prepared(layers.MLP_Block((T + 2) * D, hidden_units=[8, 3], hidden_activations=dices))
    config = DINConfig(attention_units=(7, 5), hidden_units=(8, 3), activation="dice", max_length=4)
    tower: Any = config.build(T, D)
    copy_linears([*tower.unit.linears, tower.weigh], unit)
    copy_linears(tower.deep.linears, deep)
    theirs = [one for part in (unit, deep) for one in part.modules() if hasattr(one, "alpha")]
    for mine, one in zip([*tower.unit.dice, *tower.deep.dice], theirs, strict=True):
        mine.alpha.data.copy_(one.alpha.data)
    generator = torch.Generator().manual_seed(3)
    events, target = (
        torch.randn(B, 4, D, generator=generator),
        torch.randn(B, D, generator=generator),
    )
    fields = tokens_of()
    stream = Stream(fields, events.flatten(0, 1), torch.arange(B + 1) * 4, None, target[:, None])
    for one in (tower, unit, deep):
        one.train(training)
    interest = unit(target, events, torch.ones(B, 4))
    expected = deep(torch.cat([fields.flatten(1), interest, target], 1))
    close(tower(stream)[:, 0], expected)
    assert size(tower) == size(unit, deep)


def test_a_weight_that_differs_is_seen() -> None:
    layers = installed("fuxictr.pytorch.layers")
    crosses = prepared(layers.CrossNetV2(T * D, 1))
    tower = DCNv2Config(num_cross_layers=1, structure="crossnet").build(T, D)
    copy_linears(tower.crosses, crosses)
    other = copy.deepcopy(tower)
    other.crosses[0].weight.data[0, 0] += 1e-3
    with pytest.raises(AssertionError):
        close(other(tokens_of()), crosses(tokens_of().flatten(1)))
