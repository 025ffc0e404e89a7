# SPDX-License-Identifier: MIT
"""Several epochs, each from the one before under an inheritance policy: warm-up, epochs, choice.

A warm-up trains on the first rows of the training days; epoch 1 takes everything from it; epoch k
inherits from epoch k - 1 under a policy (`trainer/warm_start/policies.py`). Every epoch is
evaluated on validation rows that no epoch trains on: after `patience` epochs without a better one
the rest are not trained, and the best one is evaluated on the test days, which nothing before has
looked at. Several policies share warm-up and first epoch, which are the same under all of them.

  python -m pipelines.run epochs --recipe dlrm.demo --data LOGS --policies progressive naive
  python -m pipelines.run epochs --recipe dlrm.demo --data LOGS \\
      --policies slow:embeddings=fresh,embedding_optimizer=fresh \\
      --later slow "--dense.learning-rate 1e-4"
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.epochs.holdout import split
from pipelines.epochs.policy_options import NAMED, EpochPolicy, parse_policies
from pipelines.orchestration import launch
from pipelines.orchestration.launch import RUN, LaunchConfig, train_and_read
from pipelines.orchestration.stage import Make, Pipeline, Stage, Work
from pipelines.orchestration.text_tables import table
from trainer.metrics.spec import METRICS, choosable, described
from trainer.runtime.atomic_files import parse_json, write_json

USAGE = """--recipe NAME --data PATH [OPTION ...]
                                      [-- --data.schema FILE --section.field VALUE ...]"""
BRIEFLY = ("processes",)


@dataclass(frozen=True, kw_only=True)
class EpochsConfig:
    """What to train and how to choose.

    Args:
        recipe: What to train.
        data: The log.
        overrides: Settings of the recipe, as words.
        train: Words that choose the rows of the epochs.
        warmup: Words that choose the rows of the warm-up.
        valid: Words that choose the rows of validation.
        test_days: What the chosen epoch is tested on; with the next two empty: nothing.
        test_rows: The same as shares of the rows.
        test_path: The same as another log.
        has_warmup: Whether the tower has a warm-up form of its own.
        restart: Whether every epoch has a schedule of learning rates of its own, from its first row
            to its last; else one spans them all.
        epochs: At most.
        policies: Of inheritance.
        patience: Epochs without a better one after which to stop; 0: never.
        metric: By which the best epoch is chosen.
        launch: How processes are started.
    """

    recipe: str
    data: str
    overrides: tuple[str, ...]
    train: tuple[str, ...]
    warmup: tuple[str, ...]
    valid: tuple[str, ...]
    test_days: str
    test_rows: str
    test_path: str
    has_warmup: bool
    restart: bool
    epochs: int
    policies: tuple[EpochPolicy, ...]
    patience: int
    metric: str
    launch: LaunchConfig

    def stages(self) -> list[Stage]:
        """Return warm-up, epochs of every policy, choice and evaluation."""
        shared = {"recipe": self.recipe, "overrides": self.overrides, "valid": self.valid}

        def stage(name: str, make: Make, config: dict[str, Any], inputs: Sequence[str]) -> Stage:
            return Stage(
                name=name,
                make=make,
                config={**shared, **config},
                inputs=tuple(inputs),
                sources=(Path(self.data),),
            )

        stages = [stage("warmup", self.warmup_run, {"train": self.warmup}, ())]
        settings = {"train": self.train, "epochs": self.epochs, "restart": self.restart}
        one = {**settings, "epoch": 1, "policy": "nightly"}
        stages.append(stage("epoch-1", self.epoch, one, ("warmup",)))
        names = ["epoch-1"]
        rule = {"patience": self.patience, "metric": self.metric}
        for policy in self.policies:
            before = ["epoch-1"]
            for number in range(2, self.epochs + 1):
                name = f"{policy.name}-epoch-{number}"
                config = {**settings, **rule, "epoch": number, "policy": policy.name}
                config |= {"sources": policy.sources, "later": policy.settings}
                make = functools.partial(self.epoch, policy=policy)
                stages.append(stage(name, make, config, ("warmup", *before)))
                before.append(name)
            names += before[1:]
        stages.append(Stage(make=choice, inputs=tuple(names), config={"metric": self.metric}))
        if self.test_days or self.test_rows or self.test_path:
            config = {"test_days": self.test_days, "test_path": self.test_path}
            config |= {"test_rows": self.test_rows} if self.test_rows else {}
            stages.append(stage("test", self.test, config, ("choice", *names)))
        return stages

    def warmup_run(self, work: Work) -> dict[str, Any]:
        """Train on the first rows; a tower that has a warm-up form stays in it."""
        words = ["--model.tower.warmup", "1"] if self.has_warmup else []
        return self.train_run(work, [*work.config["train"], "--epochs", "1", *words])

    def epoch(self, work: Work, policy: EpochPolicy | None = None) -> dict[str, Any]:
        """Train one epoch, unless the epochs before have stopped improving.

        Args:
            policy: none for the first, which takes everything from the warm-up but where in the
                data.
        """
        number = work.config["epoch"]
        before = list(work.inputs)[-1]
        if number > 1:
            values = [work.metrics[name] for name in list(work.inputs)[1:]]
            reason = stopped(values, work.config["metric"], work.config["patience"])
            if reason:
                return {"skipped": reason}
        words = ["--epochs", str(self.epochs), "--stop-epoch", str(number)]
        words = ["--epochs", "1"] if self.restart else words
        words += ["--model.tower.warmup", "0"] if self.has_warmup else []
        previous = work.inputs[before] / RUN
        if policy is None:
            words += ["--inherit.path", str(previous), "--inherit.policy", "nightly"]
        else:
            words += policy.words(previous, work.inputs["warmup"] / RUN, self.restart)
        return self.train_run(work, [*work.config["train"], *words])

    def train_run(self, work: Work, words: Sequence[str]) -> dict[str, Any]:
        """Start a training in the work's folder; return its metrics on the validation rows."""
        words = [*self.overrides, "--data.path", self.data, *self.valid, *words]
        command = self.launch.train(self.recipe, work.folder / RUN, words)
        return train_and_read(self.launch, command, work)

    def test(self, work: Work) -> dict[str, Any]:
        """Evaluate the chosen epoch on the test rows."""
        run = work.inputs[work.metrics["choice"]["best"]] / RUN
        data = self.test_path or self.data
        command = self.launch.evaluate(run, data, self.test_days, self.test_rows)
        answer = self.launch.start(command, work.folder / launch.LOG, work.say, answers=True)
        metrics = parse_json(answer)
        write_json(work.folder / "metrics.json", metrics)
        return {**metrics, "summary": described(metrics)}


def choice(work: Work) -> dict[str, Any]:
    """Choose the best epoch of all policies by the validation rows."""
    metric = work.config["metric"]
    trained = {name: values for name, values in work.metrics.items() if not values.get("skipped")}
    known = {name: values[metric] for name, values in trained.items() if values.get(metric)}
    if not known:
        raise ValueError(f"--metric: no epoch has a value of {metric!r} on the validation rows")
    best = max(known, key=lambda name: METRICS[metric].score(known[name]))
    write_json(work.folder / "epochs.json", dict(work.metrics))
    return {"best": best, metric: known[best], "summary": f"{best}: {metric} {known[best]:.4f}"}


def stopped(epochs: Sequence[Mapping[str, Any]], metric: str, patience: int) -> str:
    """Say why no further epoch is trained; empty if one is. patience 0 never stops."""
    for number, values in enumerate(epochs, 1):
        if values.get("skipped"):
            return str(values["skipped"])
        if values.get(metric) is None:
            return f"epoch {number} has no {metric}"
    values = [METRICS[metric].score(one[metric]) for one in epochs]
    best = values.index(max(values)) + 1
    if patience and len(values) - best >= patience:
        return f"{metric} was best in epoch {best}"
    return ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the pipeline's options."""
    add = parser.add_argument
    add("--recipe", required=True, help="what to train")
    add("--data", required=True, metavar="PATH", help="the log")
    add("--epochs", type=int, default=3, metavar="K", help="at most (default: 3)")
    known = f"of inheritance: {', '.join(NAMED)}, or NAME:GROUP=SOURCE,... (default: progressive)"
    add("--policies", nargs="+", default=["progressive"], metavar="POLICY", help=known)
    later = "settings of the epochs after the first under a policy, as one word"
    add("--later", nargs=2, action="append", default=[], metavar=("POLICY", "WORDS"), help=later)
    restart = "give every epoch a schedule of learning rates of its own (default: one for all)"
    add("--restart-schedule", action="store_true", help=restart)
    patience = "epochs without a better one after which to stop; 0: never (default: 1)"
    add("--patience", type=int, default=1, metavar="P", help=patience)
    metrics = "by which the best epoch is chosen (default: auc)"
    add("--metric", default="auc", choices=choosable(), help=metrics)
    share = "share of the training rows, from the first, for the warm-up (default: 0.05)"
    add("--warmup-share", type=float, default=0.05, metavar="S", help=share)
    add("--valid-days", default="", metavar="A:B", help="default: the last of the training days")
    add("--date", default="", metavar="D", help="a name for the run's folder, such as a day")
    add("--output", type=Path, metavar="DIR", help="default: runs/epochs/RECIPE")
    words = "settings of the recipe; of a log of your own: -- --data.schema FILE"
    add("overrides", nargs="*", metavar="-- --section.field VALUE", help=words)
    launch.add_options(parser)


def build(options: argparse.Namespace) -> Pipeline:
    """Return the pipeline of the options.

    Raises:
        ValueError: an option, the recipe or a setting is wrong.
    """
    from trainer.config.command_line import apply_overrides
    from trainer.data.files import days_of
    from trainer.recipes.load import load_recipe

    if options.epochs < 1 or options.patience < 0 or not 0 < options.warmup_share < 1:
        raise ValueError(
            "expected --epochs >= 1, --patience >= 0 and --warmup-share between 0 and 1, got "
            f"{options.epochs}, {options.patience} and {options.warmup_share}"
        )
    config = apply_overrides(load_recipe(options.recipe), options.overrides)
    policies = parse_policies(options.policies, options.later) if options.epochs > 1 else ()
    for policy in policies:
        apply_overrides(config, policy.settings)  # so that a wrong one is named now
    data = dataclasses.replace(config.data, path=options.data)
    days = [day for day in days_of(options.data) if day]
    train, warmup, valid = split(data, days, options.valid_days, options.warmup_share)
    epochs = EpochsConfig(
        recipe=options.recipe,
        data=options.data,
        overrides=tuple(options.overrides),
        train=train,
        warmup=warmup,
        valid=valid,
        test_days=data.test_days,
        test_rows=data.test_rows,
        test_path=data.test_path,
        has_warmup=config.has_warmup,
        restart=options.restart_schedule,
        epochs=options.epochs,
        policies=policies,
        patience=options.patience,
        metric=options.metric,
        launch=launch.from_options(options, config.outside_tower),
    )
    folder = options.output or Path("runs") / "epochs" / options.recipe
    folder = (folder / options.date if options.date else folder).resolve()
    return Pipeline(stages=epochs.stages(), folder=folder, conclude=conclude)


def conclude(metrics: Mapping[str, Mapping[str, Any]]) -> int:
    """Print the metric of each epoch under each policy; return 0."""
    names = tuple(METRICS)
    best = metrics["choice"]["best"]
    rows = []
    for name, values in metrics.items():
        if name == "choice" or values.get("skipped"):
            continue
        shown = [f"{values[key]:.4f}" if values.get(key) is not None else "-" for key in names]
        rows.append((name + " *" * (name == best), *shown))
    print(f"\n{table(('stage', *names), rows)}\n* the best epoch on the validation rows")
    return 0
