# SPDX-License-Identifier: MIT
"""What every baseline that reads a stream holds: gradients, empty histories, misfits, formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.baselines.sequences.hstu import HSTU, HSTUConfig
from models.baselines.sequences.onetrans import OneTrans, OneTransConfig
from tests.support.derivation import check_gradients, randomize
from tests.support.streams import stream_of

CONFIGS = pytest.mark.parametrize("config", [HSTUConfig, OneTransConfig])


def tower_of(config: Any, **settings: Any) -> HSTU | OneTrans:
    tower = config(**{"max_length": 6, "num_actions": 4} | settings).build(3, 8).double()
    randomize(tower, 0)
    return tower


@CONFIGS
@pytest.mark.parametrize("lengths", [[2, 0, 4], [0, 0]])
def test_gradients_of_inputs_and_weights_equal_finite_differences(
    config: Any, lengths: list[int]
) -> None:
    stream = stream_of(lengths, num_fields=2, dim=4, num_targets=2, num_actions=2)
    more = {"expansion": 0.5} if config is OneTransConfig else {}
    tower = config(num_heads=2, max_length=3, num_actions=2, **more).build(2, 4).double()
    # HSTU's LayerNorms of attention weights divided by S stand near their epsilon: larger weights,
    # whose finite differences mean something.
    randomize(tower, 0, **({"std": 1.0} if config is HSTUConfig else {}))

    def call(fields: torch.Tensor, events: torch.Tensor, targets: torch.Tensor) -> Any:
        return (stream._replace(fields=fields, events=events, targets=targets),)

    check_gradients(tower, call, stream.fields, stream.events, stream.targets)


@CONFIGS
def test_every_parameter_has_a_gradient_even_where_all_histories_are_empty(config: Any) -> None:
    tower = tower_of(config, num_layers=3)
    tower(stream_of([0, 0])).sum().backward()
    assert all(parameter.grad is not None for parameter in tower.parameters())


@CONFIGS
def test_without_history_the_score_is_of_fields_and_target_and_finite(config: Any) -> None:
    tower, stream = tower_of(config), stream_of([0, 4, 0])
    out = tower(stream)
    assert bool(out.isfinite().all())
    moved = tower(stream._replace(events=torch.flip(stream.events, [1])))
    assert torch.allclose(moved[[0, 2]], out[[0, 2]], rtol=0, atol=1e-12)
    assert (moved[1] - out[1]).abs().max() > 1e-3
    for changed in (stream._replace(fields=-stream.fields), stream._replace(targets=out)):
        assert (tower(changed)[0] - out[0]).abs().max() > 1e-3


@CONFIGS
def test_streams_of_another_schema_are_refused(config: Any) -> None:
    tower = tower_of(config)
    with pytest.raises(ValueError, match=r"built for fields of shape \(B, 3, 8\)"):
        tower(stream_of([2], num_fields=4))
    with pytest.raises(ValueError, match="events of width 8"):
        tower(stream_of([2], dim=4))
    with pytest.raises(ValueError, match="num_actions is 4 but the stream has no actions"):
        tower(stream_of([2], num_actions=0))
    with pytest.raises(ValueError, match="num_actions is 0 but the stream has actions"):
        tower_of(config, num_actions=0)(stream_of([2]))
