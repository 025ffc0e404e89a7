# SPDX-License-Identifier: MIT
"""Telemetry writes at the exact steps, tells input wait from work, and raises alerts by name."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from trainer.runtime.atomic_files import write_json
from trainer.telemetry.alerts import ADVICE, Alerts
from trainer.telemetry.running_stats import InputTimer
from trainer.telemetry.telemetry import StepReport, Telemetry, TelemetryConfig

HEALTHY = {
    "step": 1000,
    "loss": 0.2,
    "auc": 0.7,
    "input_wait": 0.01,
    "label_mean": 0.05,
    "prediction_mean": 0.05,
    "prediction_std": 0.02,
    "prediction_min": 0.001,
    "prediction_max": 0.4,
}


def report(step: int, loss: float = 0.5, predictions=None, **options) -> StepReport:
    generator = torch.Generator().manual_seed(step)
    labels = (torch.rand(64, 1, generator=generator) < 0.3).float()
    if predictions is None:
        predictions = (0.2 * torch.rand(64, 1, generator=generator) + 0.3 * labels).clamp(0, 1)
    return StepReport(
        step=step,
        rows=128,
        loss=torch.tensor(loss),
        predictions=predictions,
        labels=labels,
        weights=torch.ones(64, 1),
        **options,
    )


def points(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "curves.jsonl").read_text().splitlines()]


def run(folder: Path, steps: int, total: int | None, config: TelemetryConfig) -> Telemetry:
    with Telemetry(folder, 0, total, config) as telemetry:
        for step in range(1, steps + 1):
            telemetry.update(report(step))
    return telemetry


@pytest.mark.parametrize(
    ("steps", "total", "expected"),
    [
        (10, 10, [4, 8, 10]),
        (8, 8, [4, 8]),
        (3, 3, [3]),
        (10, None, [4, 8, 10]),
        (6, 20, [4, 6]),
        (0, 10, []),
    ],
)
def test_points_lie_at_every_interval_and_at_the_last_step_never_at_zero(
    tmp_path, steps, total, expected
):
    run(tmp_path, steps, total, TelemetryConfig(interval_steps=4, mode="quiet"))
    path = tmp_path / "curves.jsonl"
    assert [point["step"] for point in points(tmp_path)] == expected if path.exists() else not steps


def test_a_point_holds_the_interval(tmp_path):
    with Telemetry(tmp_path, 0, 4, TelemetryConfig(interval_steps=2, mode="quiet")) as telemetry:
        for step, loss in enumerate((1.0, 3.0, 5.0, math.inf), start=1):
            telemetry.update(report(step, loss, learning_rate=0.1, loss_scale=64.0, skipped=1))
    first, second = points(tmp_path)
    assert (first["loss"], first["nonfinite_steps"]) == (2.0, 0)
    assert (second["loss"], second["nonfinite_steps"]) == (5.0, 1)
    assert (first["rows"], second["rows"]) == (256, 512)
    assert second["learning_rate"] == 0.1 and second["loss_scale"] == 64 and second["skipped"] == 1
    assert second["auc"] > 0.9 and 0 < second["label_mean"] < 1
    assert second["rows_per_second"] > 0 and 0 <= second["input_wait"] <= 1
    assert second["alerts"] == []


def test_a_resumed_run_drops_the_points_it_will_train_again(tmp_path):
    config = TelemetryConfig(interval_steps=2, mode="quiet")
    run(tmp_path, 7, 12, config)
    with (tmp_path / "curves.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # cut short by a crash
    config.build(tmp_path, 1, 12).update(report(8))
    assert len((tmp_path / "curves.jsonl").read_text().splitlines()) == 5, "rank 1 writes nothing"
    telemetry = Telemetry(tmp_path, 0, 12, config)
    telemetry.start(6)
    with telemetry:
        for step in range(7, 13):
            telemetry.update(report(step))
    assert [point["step"] for point in points(tmp_path)] == [2, 4, 6, 8, 10, 12]
    assert [point["rows"] for point in points(tmp_path)] == [256, 512, 768, 1024, 1280, 1536]


def test_a_new_run_begins_a_new_curve(tmp_path):
    config = TelemetryConfig(interval_steps=2, mode="quiet")
    run(tmp_path, 4, 4, config)
    run(tmp_path, 2, 2, config)
    assert [point["step"] for point in points(tmp_path)] == [2]


@pytest.mark.parametrize("mode", ["rich", "plain"])
def test_without_a_terminal_there_is_one_line_per_interval_on_stderr(tmp_path, capsys, mode):
    run(tmp_path, 6, 6, TelemetryConfig(interval_steps=3, mode=mode))
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert output.out == "" and len(lines) == 2
    for part in ("step 3/6", "loss 0.5", "auc 1.0000", "rows/s", "input wait", "eta 0:00:0"):
        assert part in lines[0]


def test_a_terminal_gets_a_progress_bar(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    run(tmp_path, 6, 6, TelemetryConfig(interval_steps=3))
    output = capsys.readouterr()
    assert output.out == ""
    for part in ("train", "6/6", "loss 0.5", "auc 1.0", "rows/s", "input wait", "eta"):
        assert part in output.err


def test_json_mode_prints_the_curve_and_quiet_prints_nothing(tmp_path, capsys):
    run(tmp_path / "a", 6, 6, TelemetryConfig(interval_steps=3, mode="json"))
    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line) for line in lines] == points(tmp_path / "a")
    with Telemetry(tmp_path / "c", 0, 6, TelemetryConfig(mode="json")) as telemetry:
        telemetry.evaluation(6, {"auc": 0.75, "rows": 10})
        telemetry.say("ALERT", loud=True)
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in said] == ["info", "alert"]
    assert "auc 0.75" in said[0]["message"] and said[0].keys() == {"time", "level", "message"}
    run(tmp_path / "b", 6, 6, TelemetryConfig(interval_steps=3, mode="quiet"))
    assert capsys.readouterr().err == ""


def test_other_ranks_neither_speak_nor_write(tmp_path, capsys):
    telemetry = Telemetry(tmp_path / "run", 1, 4, TelemetryConfig(interval_steps=1))
    telemetry.update(report(1))
    telemetry.evaluation(1, {"auc": 0.7})
    telemetry.say("hello", loud=True)
    telemetry.close()
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "run").exists()


def test_evaluations_are_said_and_kept(tmp_path, capsys):
    with Telemetry(tmp_path, 0, 4, TelemetryConfig(mode="plain")) as telemetry:
        telemetry.evaluation(4, {"auc": 0.75, "gauc": math.nan, "rows": 1000.0})
    line = json.loads((tmp_path / "evaluations.jsonl").read_text())
    assert line == {"step": 4, "auc": 0.75, "gauc": None, "rows": 1000.0, "alerts": []}
    assert "auc 0.7500" in capsys.readouterr().err


def test_an_evaluation_says_its_error_and_no_gauc_that_the_log_cannot_have(tmp_path, capsys):
    metrics = {"auc": 0.75, "auc_standard_error": 0.0031, "logloss": 0.2, "rows": 1000.0}
    with Telemetry(tmp_path, 0, 4, TelemetryConfig(mode="plain")) as telemetry:
        telemetry.evaluation(4, metrics | {"gauc": math.nan})
        telemetry.evaluation(4, metrics | {"gauc": 0.7})
        telemetry.evaluation(4, {"auc": math.nan, "auc_standard_error": math.nan, "rows": 1.0})
    said = [line.split(": ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "auc 0.7500 ± 0.0031, logloss 0.2000 over 1,000 test rows",
        "auc 0.7500 ± 0.0031, gauc 0.7000, logloss 0.2000 over 1,000 test rows",
        "auc nan over 1 test rows",
    ]


@dataclass
class Clock:
    """A clock that only moves when told to."""

    now: float = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("trainer.telemetry.running_stats.time", clock)
    monkeypatch.setattr("trainer.telemetry.telemetry.time", clock)
    monkeypatch.setattr("trainer.telemetry.console.time", clock)
    return clock


def test_the_timer_counts_waiting_and_not_work(clock):
    def slow():
        for item in range(3):
            clock.now += 2
            yield item
        clock.now += 1

    timer = InputTimer()
    for _ in timer.watch(slow()):
        clock.now += 5
    assert timer.seconds == 7


def test_waiting_that_fails_is_counted_too(clock):
    timer = InputTimer()
    with pytest.raises(KeyError), timer.waiting():
        clock.now += 3
        raise KeyError
    assert timer.seconds == 3


def test_rates_and_input_wait_are_those_of_the_interval(tmp_path, clock):
    with Telemetry(tmp_path, 0, 4, TelemetryConfig(interval_steps=2, mode="quiet")) as telemetry:
        for step in range(1, 5):
            with telemetry.timer.waiting():
                clock.now += 3 if step > 2 else 1
            clock.now += 1
            telemetry.update(report(step))
    first, second = points(tmp_path)
    assert (first["input_wait"], second["input_wait"]) == (0.5, 0.75)
    assert (first["rows_per_second"], second["rows_per_second"]) == (64, 32)
    assert (first["seconds"], second["seconds"]) == (4, 12)


def test_constant_predictions_are_a_loud_alert_in_the_curve(tmp_path, capsys):
    config = TelemetryConfig(interval_steps=5, mode="quiet", alert_after_steps=5)
    with Telemetry(tmp_path, 0, 20, config) as telemetry:
        for step in range(1, 21):
            telemetry.update(report(step, predictions=torch.full((64, 1), 0.31)))
    lines = capsys.readouterr().err.splitlines()
    assert "ALERT constant_predictions at step 10" in lines[0]
    assert "Likely causes" in lines[0] and "Way out" in lines[0]
    assert sum("constant_predictions" in line for line in lines) == 1, "one alert, not one a point"
    alerts = [point["alerts"] for point in points(tmp_path)]
    assert alerts[:2] == [[], ["constant_predictions"]]
    assert telemetry.alerts["constant_predictions"] == 10


def test_a_healthy_run_raises_no_alert(tmp_path):
    telemetry = run(tmp_path, 40, 40, TelemetryConfig(interval_steps=5, alert_after_steps=0))
    assert telemetry.alerts == {}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"prediction_std": 1e-9}, "constant_predictions"),
        ({"prediction_min": 0.5, "prediction_mean": 0.6}, "one_sided_predictions"),
        ({"prediction_max": 1e-3, "prediction_mean": 1e-4}, "one_sided_predictions"),
        ({"prediction_min": 1.0, "prediction_mean": 1.0}, "one_sided_predictions"),
        ({"auc": 0.505}, "auc_stuck"),
        ({"input_wait": 0.8}, "input_bound"),
        ({"loss": math.nan}, "nonfinite_loss"),
        ({"skipped": 1000}, "no_update"),
    ],
)
def test_each_failure_raises_its_own_alert(change, name):
    alerts = Alerts(after_steps=200, intervals=3)
    raised = [alerts.check(HEALTHY | change) for _ in range(3)]
    assert [key for messages in raised for key in messages] == [name]
    message = next(messages[name] for messages in raised if messages)
    assert message.endswith(ADVICE[name])
    assert alerts.active == {name} and alerts.first_steps == {name: 1000}


def test_a_run_whose_steps_were_all_skipped_says_so_at_once_however_short():
    def raised(step, skipped):
        return set(Alerts(200, 3).check(HEALTHY | {"step": step, "skipped": skipped}))

    assert raised(3, 3) == raised(20, 20) == {"no_update"}
    assert raised(2, 2) == raised(3, 2) == raised(1000, 999) == set()  # the scale finds its place


def test_alerts_wait_for_the_warm_up_and_can_be_raised_again():
    alerts = Alerts(after_steps=200, intervals=1)
    assert alerts.check(HEALTHY | {"step": 200, "prediction_std": 0.0}) == {}
    assert alerts.check(HEALTHY | {"prediction_std": 0.0})
    assert alerts.check(HEALTHY) == {} and alerts.active == set()
    assert alerts.check(HEALTHY | {"step": 1200, "prediction_std": 0.0})
    assert alerts.first_steps == {"constant_predictions": 1000}


def test_undefined_statistics_ring_nothing():
    missing = dict.fromkeys(HEALTHY, math.nan) | {"step": 1000, "loss": 0.3}
    assert Alerts(0, 1).check(missing) == {}


def test_json_has_null_where_a_number_is_undefined(tmp_path):
    write_json(tmp_path / "metrics.json", {"auc": math.nan, "rows": 3, "list": [math.inf, 1.0]})
    assert json.loads((tmp_path / "metrics.json").read_text()) == {
        "auc": None,
        "rows": 3,
        "list": [None, 1.0],
    }
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]


@pytest.mark.parametrize("name", ["interval_steps", "window_examples", "alert_intervals"])
def test_settings_below_their_minimum_are_named(name):
    with pytest.raises(ValueError, match=rf"telemetry\.{name} must be at least 1"):
        TelemetryConfig(**{name: 0})


def test_an_evaluation_that_means_nothing_raises_an_alert_once_in_any_mode(tmp_path, capsys):
    bad = {"auc": 0.0, "rows": 400.0, "positive_rows": 20.0, "ne": 10.0, "calibration": 1.0}
    with Telemetry(tmp_path, 0, 4, TelemetryConfig(mode="quiet")) as telemetry:
        telemetry.evaluation(2, bad)
        telemetry.evaluation(4, bad, details={"intervals": {"auc": [0.0, 0.0]}})
        state = telemetry.state_dict()
    said = capsys.readouterr().err
    assert (
        said.count("ALERT few_rows_of_a_class at step 2: auc 0.0000 rests on 20 positive of") == 1
    )
    assert said.count("ALERT worse_than_constant") == 1
    assert "ALERT interval_without_width at step 4: the 95 % interval of auc 0.0000" in said
    lines = [json.loads(one) for one in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert "interval_without_width" in lines[1]["alerts"]
    assert telemetry.alerts["worse_than_constant"] == 2
    other = Alerts(after_steps=0, intervals=1)
    other.load_state_dict(state["alerts"])
    assert other.evaluated(6, {"worse_than_constant": "ne is 10.0000"}) == {}


def test_a_run_shorter_than_the_warm_up_is_watched_in_its_second_half(tmp_path, capsys):
    with Telemetry(tmp_path, 0, 8, TelemetryConfig(mode="quiet", interval_steps=2)) as telemetry:
        for step in range(1, 9):
            batch = torch.full((64, 1), 0.3), (torch.arange(64) % 2).float()[:, None]
            telemetry.update(
                StepReport(
                    step=step,
                    rows=64,
                    loss=0.7,
                    predictions=batch[0],
                    labels=batch[1],
                    weights=torch.ones(64, 1),
                )
            )
    assert telemetry.alerts["constant_predictions"] == 6
