# SPDX-License-Identifier: MIT
"""What every tower of the recipes holds, with the settings that its recipes have.

Field towers get (B, T, D) tokens, stream towers a stream whose
histories are ragged and partly empty.

Shapes: B examples, T tokens or fields, D token width.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from embeddings.optimizer import SparseOptimizerConfig
from models.baselines.fields.autoint import AutoIntConfig
from models.baselines.fields.dcnv2 import DCNv2Config
from models.baselines.fields.finalmlp import FinalMLPConfig
from models.baselines.fields.gdcn import GDCNConfig
from models.baselines.fields.masknet import MaskNetConfig
from models.baselines.fields.xdeepfm import XDeepFMConfig
from models.baselines.sequences.din import DINConfig
from models.baselines.sequences.sasrec import SASRecConfig
from models.baselines.tokens.rankmixer import RankMixerConfig
from models.ranking import RankingModel
from models.stream import Stream
from models.tower import StreamTowerConfig, Tower, TowerConfig, find_tower
from models.towers.rankelastor import RankElastorConfig
from models.towers.specformer import SpecFormerConfig
from tests.support.derivation import randomize
from tests.support.processes import Processes
from tests.support.streams import example_of, stream_of
from tests.support.tiny import SCHEMA, make_batch
from trainer.distributed import compile as compiled
from trainer.distributed.dense import Replicated
from trainer.distributed.parallelize import ParallelConfig, parallelize
from trainer.distributed.precision import PrecisionConfig
from trainer.recipes.towers import TOWERS
from trainer.runtime.runtime import Runtime

T, D = 4, 8
LENGTHS = [3, 0, 9, 1]
DOUBLE = torch.float64
# Forms of towers that no recipe has, small.
FORMS: dict[str, TowerConfig] = {
    "dcnv2 low rank": DCNv2Config(rank=3, structure="crossnet"),
    "dcnv2 stacked": DCNv2Config(structure="stacked", hidden_units=(5,)),
    "gdcn stacked": GDCNConfig(structure="stacked", hidden_units=(5,)),
    "autoint+": AutoIntConfig(num_layers=1, scale=True, hidden_units=(5,)),
    "masknet parallel": MaskNetConfig(
        structure="parallel", block_units=(5, 3), reduction=2.0, hidden_units=(4,)
    ),
    "finalmlp plain": FinalMLPConfig(num_heads=1, gate_units=()),
    "xdeepfm bias": XDeepFMConfig(cin_units=(2,), bias=True, hidden_units=(5,)),
    "din dice": DINConfig(activation="dice", softmax=True, max_length=6),
    "sasrec dropout": SASRecConfig(dropout=0.1, max_length=6),
    "rankmixer glu": RankMixerConfig(ffn="glu", pooling="flatten"),
    "rankelastor code": RankElastorConfig(variant="code"),
    "specformer diagonal": SpecFormerConfig(num_layers=1, position_bias="diagonal"),
}
CASES = {name: entry.model().tower for name, entry in TOWERS.items()} | FORMS
STREAMS = [name for name, config in CASES.items() if isinstance(config, StreamTowerConfig)]
FIELDS = [name for name in CASES if name not in STREAMS]

Inputs = Tensor | Stream


def build(name: str, std: float = 0.0) -> Tower:
    """Return a tower in evaluation mode; std: of random weights in place of its own start."""
    torch.manual_seed(0)
    tower = CASES[name].build(T, D)
    tower.set_progress(1.0)
    if std:
        randomize(tower, 1, std)
    return tower.eval()


def inputs(name: str, lengths: list[int] = LENGTHS, seed: int = 0) -> Inputs:
    """Return float64 inputs of `len(lengths)` examples."""
    if name in STREAMS:
        return stream_of(lengths, num_fields=T, dim=D, num_actions=0, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(lengths), T, D, dtype=DOUBLE, generator=generator)


def cast(value: Inputs, dtype: torch.dtype) -> Inputs:
    if isinstance(value, Tensor):
        return value.to(dtype)
    parts = {name: getattr(value, name).to(dtype) for name in ("fields", "events", "targets")}
    return value._replace(**parts)


def track(value: Inputs) -> Inputs:
    """Return inputs that take gradients; logistic regression has no weights outside the tables."""
    if isinstance(value, Tensor):
        return value.requires_grad_()
    return value._replace(targets=value.targets.requires_grad_())


def pick(value: Inputs, examples: list[int]) -> Inputs:
    """Return these examples alone, in this order."""
    if isinstance(value, Tensor):
        return value[examples]
    ones = [example_of(value, example, 0) for example in examples]
    lengths = torch.tensor([0, *(len(one.events) for one in ones)])
    return Stream(
        fields=torch.cat([one.fields for one in ones]),
        events=torch.cat([one.events for one in ones]),
        offsets=lengths.cumsum(0),
        actions=None,
        targets=torch.cat([one.targets for one in ones]),
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_stays_close_and_trains_every_weight(name: str, dtype: torch.dtype) -> None:
    tower, values = build(name), cast(inputs(name), torch.float32)
    exact = tower(values)
    with torch.autocast("cpu", dtype=dtype):
        found = tower(values)
    tolerance = 0.06 if dtype == torch.bfloat16 else 0.01
    scale = max(1.0, float(exact.detach().abs().max()))
    assert float((found.float() - exact).detach().abs().max()) < tolerance * scale
    tower.train()
    values = track(values)
    with torch.autocast("cpu", dtype=dtype):
        out = tower(values)
    generator = torch.Generator().manual_seed(1)
    (out.float() * torch.randn(out.shape, generator=generator)).sum().backward()
    for path, parameter in tower.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), path


@pytest.mark.parametrize("name", CASES)
def test_half_precision_inputs_are_widened(name: str) -> None:
    tower, values = build(name), cast(inputs(name), torch.bfloat16)
    assert torch.equal(tower(values), tower(cast(values, torch.float32)))


@pytest.mark.parametrize("name", CASES)
def test_weights_in_half_precision_train_under_autocast(name: str) -> None:
    """As DeepSpeed's bf16 and fp16 engines keep them; inputs come in float32 or half precision."""
    tower, half = build(name).to(torch.bfloat16).train(), torch.bfloat16
    for dtype in (torch.float32, half):
        tower.zero_grad()
        with torch.autocast("cpu", dtype=half):
            out = tower(track(cast(inputs(name), dtype)))
        out.float().square().sum().backward()
        for path, parameter in tower.named_parameters():
            assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), path


@pytest.mark.parametrize("name", CASES)
def test_rows_permuted_are_scores_permuted_and_a_row_alone_scores_the_same(name: str) -> None:
    tower, values = build(name, std=0.2).double(), inputs(name)
    out = tower(values)
    order = [2, 0, 3, 1]
    assert torch.allclose(tower(pick(values, order)), out[order], rtol=1e-9, atol=1e-9)
    for example in range(len(LENGTHS)):
        alone = tower(pick(values, [example]))
        assert torch.allclose(alone, out[example : example + 1], rtol=1e-9, atol=1e-9), example


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lengths", [[0, 0, 0], [1, 200, 0]], ids=["empty", "longer"])
def test_histories_of_any_length_and_inputs_of_zeros_give_finite_scores_and_gradients(
    name: str, lengths: list[int]
) -> None:
    tower, values = build(name).double().train(), inputs(name, lengths)
    if not any(lengths):
        values = values * 0 if isinstance(values, Tensor) else values
    out = tower(track(values))
    assert out.shape[0] == len(lengths) and out.shape[-1] == tower.output_dim
    assert bool(out.isfinite().all())
    out.sum().backward()
    for path, parameter in tower.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), path


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_along_a_random_direction_is_that_of_finite_differences(name: str) -> None:
    tower, values = build(name, std=0.1).double(), inputs(name)
    generator = torch.Generator().manual_seed(2)
    floats = {"": values} if isinstance(values, Tensor) else values._asdict()
    parts = {f"input {key}": one for key, one in floats.items() if getattr(one, "grad", 0) is None}
    parts = {key: one.requires_grad_() for key, one in parts.items() if one.is_floating_point()}
    leaves = dict(tower.named_parameters())

    def draw(like: Tensor) -> Tensor:
        return torch.randn(like.shape, dtype=DOUBLE, generator=generator)

    moves = {key: draw(one) for key, one in (leaves | parts).items()}
    out = tower(values)
    weight = draw(out)
    (out * weight).sum().backward()
    expected = sum(float((one.grad * moves[key]).sum()) for key, one in (leaves | parts).items())

    def value_at(step: float) -> float:
        moved = {key: one.detach() + step * moves[key] for key, one in (leaves | parts).items()}
        given: Any = moved.get("input ")
        if isinstance(values, Stream):
            given = values._replace(**{key.split()[1]: moved[key] for key in parts})
        weights = {key: moved[key] for key in leaves}
        return float((functional_call(tower, weights, (given,)) * weight).sum())

    # So short that hardly any of the thousands of ReLUs changes its side.
    step = 1e-8
    found = (value_at(step) - value_at(-step)) / (2 * step)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_saved_and_loaded_weights_score_bit_equal(name: str) -> None:
    tower, values = build(name, std=0.2), cast(inputs(name), torch.float32)
    file = io.BytesIO()
    torch.save(tower.state_dict(), file)
    file.seek(0)
    other = build(name, std=0.1)
    before = zip(other.parameters(), tower.parameters(), strict=True)
    assert all(not torch.equal(a, b) for a, b in before)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(values), tower(values))


# Without the form of SpecFormer whose decomposition makes the batch size a constant.
@pytest.mark.parametrize("name", [name for name in FIELDS if name != "specformer diagonal"])
def test_a_tower_of_fields_is_exported_for_any_batch(name: str) -> None:
    tower, values = build(name, std=0.2).double(), inputs(name)
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(tower, (values,), dynamic_shapes=({0: batch},))
    more = torch.cat([values, values])
    assert torch.allclose(program.module()(more), tower(more), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["dcnv2", "rankmixer"])
def test_a_compiled_tower_scores_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    tower, values = build(name, std=0.2).double(), inputs(name)
    exact = tower(values)
    compiled.compile_tower(tower, ragged=name in STREAMS)
    assert torch.allclose(tower(values), exact, rtol=1e-9, atol=1e-9)


def _train_each(runtime: Runtime, names: list[str]) -> dict[str, dict[str, Any]]:
    """Train each tower for three steps of SGD on this rank's share; return losses and weights."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        model = RankingModel(SCHEMA, TOWERS[name].model(), torch.device("meta"), seed=0)
        sparse = SparseOptimizerConfig(kind="sgd", learning_rate=0.1)
        unused = ParallelConfig(find_unused_parameters=True)
        parallel = parallelize(model, unused, sparse, runtime, batch_size=ROWS)
        weights = parallel.dense_parameters
        optimizer = torch.optim.SGD(weights.values(), lr=0.05, fused=True)
        dense = Replicated(weights, optimizer, runtime.group)
        precision = PrecisionConfig().build(
            parallel.model, dense, sparse.zero_is_no_update, parallel.exchange
        )
        size, losses = ROWS // runtime.world_size, []
        for step in range(3):
            model.tower.set_progress(step / 3)
            batch = make_batch(ROWS, step, runtime.rank * size, (runtime.rank + 1) * size)
            optimizer.zero_grad()
            loss, output = parallel.module(batch)
            precision.backward(loss, output.weight_sum)
            losses.append(precision.apply().loss)
        found[name] = {
            "losses": losses,
            "weights": {key: one.detach().clone() for key, one in weights.items()},
        }
    return found


ROWS = 16


@pytest.mark.dist
def test_two_ranks_train_every_tower_as_one_rank_does(processes: Processes) -> None:
    names = list(TOWERS)
    one = processes.run(_train_each, names, world_size=1, timeout_seconds=400)[0]
    two = processes.run(_train_each, names, world_size=2, timeout_seconds=400)
    for name in names:
        assert two[0][name]["losses"] == two[1][name]["losses"], name
        assert two[0][name]["losses"] == pytest.approx(one[name]["losses"], rel=1e-4), name
        for key, value in two[0][name]["weights"].items():
            assert torch.equal(value, two[1][name]["weights"][key]), (name, key)
            torch.testing.assert_close(value, one[name]["weights"][key], rtol=1e-3, atol=1e-5)


def test_every_tower_of_the_repository_is_a_case() -> None:
    with pytest.raises(ValueError, match="expected one of") as error:
        find_tower("none")
    known = str(error.value).partition("expected one of ")[2].partition(";")[0].split(", ")
    ours = {name for name in known if ":" not in name}
    assert ours == {type(config).__name__ for config in CASES.values()}
