# SPDX-License-Identifier: MIT
"""Examples without weight do not train silently: the label and its columns are named."""

import pytest
import torch
import torch.distributed as dist

from embeddings.schema.schema import Label
from trainer.telemetry.alerts import LabelWeights

LABELS = (Label(name="click", weight="seconds"), Label(name="like", column="liked"))


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def add(weights: LabelWeights, *rows: tuple[float, float]) -> None:
    labels = torch.tensor([[0.0, 1.0], [1.0, 0.0]])[: len(rows)]
    weights.add(torch.tensor(rows), labels)


def test_a_label_without_weight_in_a_whole_interval_rings_once_and_again_after_it_was_back(group):
    weights = LabelWeights(LABELS, group)
    add(weights, (1, 0), (2, 0))
    add(weights, (0, 0))
    (message,) = weights.interval(2)
    assert "ALERT no_weight at step 2: label 'like': every example of steps 1 to 2 " in message
    assert "its column 'liked' is null" in message
    add(weights, (1, 0))
    assert weights.interval(4) == []
    add(weights, (1, 1))
    assert weights.interval(6) == []
    add(weights, (0, 1))
    (message,) = weights.interval(8)
    assert "label 'click': every example of steps 7 to 8" in message
    assert "its weight column 'seconds' is 0, or its column 'click' null" in message
    assert weights.first_steps == {"no_weight": 2}
    weights.check_epoch(8)
    assert weights.interval(8) == [], "nothing was added"


def test_an_epoch_without_any_weight_is_an_error_that_names_every_column(group):
    weights = LabelWeights(LABELS, group)
    add(weights, (1, 1))
    weights.interval(3)
    weights.begin_epoch(3)
    add(weights, (0, 0))
    weights.interval(6)
    with pytest.raises(ValueError, match=r"'click'.*steps 4 to 6 .*'seconds'.*'like'.*'liked'"):
        weights.check_epoch(6)
    weights.begin_epoch(6)
    weights.check_epoch(6)


@pytest.mark.dist
def test_weight_on_one_rank_is_enough(processes):
    assert processes.run(_alerts) == [1, 1]


def _alerts(runtime) -> int:
    """Return how many of two labels are without weight where rank 1 has some of the first."""
    weights = LabelWeights(LABELS, runtime.group)
    add(weights, (float(runtime.rank), 0.0))
    return len(weights.interval(1))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_label_of_one_value_raises_an_alert_once_few_rows_or_many(value, group):
    weights = LabelWeights((Label(name="click"),), group)
    weights.add(torch.ones(200, 1), torch.full((200, 1), value))
    assert weights.interval(3) == [], "so few rows may be alike by chance"
    weights.add(torch.tensor([[1.0]] * 200 + [[0.0]] * 50), torch.full((250, 1), value))
    (message,) = weights.interval(6, last=True)
    assert message.startswith(
        f"ALERT constant_label at step 6: label 'click' is {value:.0f} in all 400 rows of steps 1 "
    )
    assert weights.active == {"constant_label"}
    assert weights.first_steps == {"constant_label": 6}
    weights.begin_epoch(6)
    weights.add(torch.ones(20_000, 1), torch.full((20_000, 1), value))
    assert weights.interval(9) == [], "it has not been otherwise meanwhile"
    weights.add(torch.ones(2, 1), torch.tensor([[0.0], [1.0]]))
    assert weights.interval(12) == [] and weights.active == set()


def test_many_rows_of_one_value_raise_an_alert_before_the_epoch_ends(group):
    weights = LabelWeights((Label(name="click"),), group)
    weights.add(torch.ones(20_000, 1), torch.zeros(20_000, 1))
    (message,) = weights.interval(9)
    assert "is 0 in all 20,000 rows of steps 1 to 9" in message
