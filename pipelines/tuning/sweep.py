# SPDX-License-Identifier: MIT
"""A sweep: trials of a recipe with other settings, each a run of its own, by Optuna.

The sampler is TPE (Bergstra et al., "Algorithms for Hyper-Parameter Optimization", 2011). A trial
that is worse than the median of the others at the same evaluation is ended (median pruning). What
is known stands in a journal, so a sweep that was killed goes on, its unfinished trials from their
checkpoints.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from pipelines.orchestration.launch import LOG, RUN, Ended, LaunchConfig
from pipelines.orchestration.stage import StageError
from pipelines.tuning.space import Tuned
from trainer.metrics.spec import METRICS
from trainer.runtime.atomic_files import read_json, write_json
from trainer.runtime.dict_diff import differences
from trainer.runtime.json_lines import read_steps

SWEEP, JOURNAL, RESULT, TRIALS = "sweep.json", "journal.jsonl", "result.json", "trials"
_FOLDER = "folder"  # a trial's, which one that goes on takes over
# Trials before any is ended, and evaluations of a trial before it may be.
_FIRST_TRIALS, _FIRST_EVALUATIONS = 5, 1
_FAILURES = 3  # in a row, after which the sweep ends


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """What a sweep does.

    Args:
        recipe: what is trained.
        words: settings of all trials.
        space: what a trial changes.
        metric: by which trials are judged, on the runs' test rows.
        trials: how many are finished at the end.
        jobs: how many run at the same time.
        seed: of the sampler.
        prune: whether trials that do badly are ended early.
    """

    recipe: str
    words: tuple[str, ...]
    space: tuple[Tuned, ...]
    metric: str = "auc"
    trials: int = 20
    jobs: int = 1
    seed: int = 0
    prune: bool = True

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in ("trials", "jobs"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}: expected at least 1, got {getattr(self, name)}")

    def fixed(self) -> dict[str, Any]:
        """Return what must not change while a sweep goes on."""
        space = [
            {"setting": one.setting, "choices": list(one.choices), "low": one.low, "high": one.high}
            | {"log": one.log, "whole": one.whole}
            for one in self.space
        ]
        found = {"recipe": self.recipe, "words": list(self.words), "space": space}
        return found | {"metric": self.metric, "seed": self.seed, "prune": self.prune}


class Sweep:
    """The trials in a folder.

    Args:
        config: what to do.
        folder: of the sweep, which this process has locked.
        launch: how a run is started.
        say: prints a line.

    Raises:
        ValueError: the folder holds a sweep of other settings.
    """

    def __init__(
        self, config: SweepConfig, folder: Path, launch: LaunchConfig, say: Callable[[str], None]
    ) -> None:
        self._config, self._folder, self._launch, self._say = config, folder, launch, say
        self._score = METRICS[config.metric].score
        (folder / TRIALS).mkdir(parents=True, exist_ok=True)
        path = folder / SWEEP
        if path.exists():
            changed = [str(one) for one in differences(read_json(path), config.fixed())]
            if changed:
                raise ValueError(
                    f"{folder}: holds a sweep of other settings ({'; '.join(changed[:3])}); "
                    "restore them, or choose another --output"
                )
        else:
            write_json(path, config.fixed())
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
        if config.prune:
            pruner = optuna.pruners.MedianPruner(_FIRST_TRIALS, _FIRST_EVALUATIONS - 1)
        journal = folder / JOURNAL
        try:
            self.study = optuna.create_study(
                study_name="sweep",
                storage=JournalStorage(JournalFileBackend(str(journal))),
                direction="maximize",
                pruner=pruner,
                load_if_exists=True,
            )
        except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
            raise ValueError(
                f"{journal}: expected a line of JSON for each change of a trial, cannot read it "
                f"({error}); restore it, or choose another --output"
            ) from error
        # So that a sweep that goes on does not draw the first trials again.
        seed = config.seed + len(self.study.trials)
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=config.jobs > 1)
        self._lock, self._failures = threading.Lock(), 0

    def run(self) -> dict[str, Any]:
        """Finish the trials; write and return the result.

        Raises:
            ValueError: the settings are wrong, or trials fail one after the other.
        """
        for trial in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            # Of a sweep that was killed: another trial takes over its settings and its folder.
            name = trial.user_attrs.get(_FOLDER, "")
            self.study.tell(trial.number, state=TrialState.FAIL)
            attributes = {_FOLDER: name} if name else None
            self.study.enqueue_trial(trial.params, user_attrs=attributes)
        missing = self._config.trials - len(self._ended())
        with ThreadPoolExecutor(self._config.jobs) as pool:
            for done in [pool.submit(self._trial) for _ in range(max(missing, 0))]:
                done.result()
        result = self.result()
        write_json(self._folder / RESULT, result)
        return result

    def result(self) -> dict[str, Any]:
        """Return the trials, the best first, with the settings and what each setting matters."""
        metric, done = self._config.metric, self._ended()
        trials = [
            {
                "trial": one.number,
                "folder": one.user_attrs.get(_FOLDER, ""),
                "state": one.state.name.lower(),
                metric: one.user_attrs.get(metric),
                "settings": one.params,
                "seconds": one.duration.total_seconds() if one.duration else None,
            }
            for one in done
        ]
        finished = [one for one in trials if one["state"] == "complete"]
        others = [one for one in trials if one["state"] != "complete"]
        finished.sort(key=lambda one: self._score(one[metric]), reverse=True)
        found: dict[str, Any] = {**self._config.fixed(), "trials": [*finished, *others]}
        found["best"] = finished[0] if finished else None
        found["importance"] = self._importance(len(finished))
        return found

    def _importance(self, finished: int) -> dict[str, float]:
        """Return the share of each setting (PED-ANOVA, Watanabe et al. 2023); empty if unknown."""
        if finished < 2 or len(self._config.space) < 2:
            return {}
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        try:
            found = optuna.importance.get_param_importances(self.study, evaluator=evaluator)
        except (ValueError, RuntimeError):  # of trials that are all alike
            return {}
        return {name: float(value) for name, value in found.items()}

    def _ended(self) -> list[optuna.trial.FrozenTrial]:
        states = [TrialState.COMPLETE, TrialState.PRUNED]
        return self.study.get_trials(deepcopy=False, states=states)

    def _trial(self) -> None:
        """Run trials until one is complete or pruned."""
        while True:
            with self._lock:
                trial = self.study.ask()
                settings = {one.setting: one.draw(trial) for one in self._config.space}
                name = trial.user_attrs.get(_FOLDER) or f"{trial.number:04d}"
                trial.set_user_attr(_FOLDER, name)
            if self._finish(trial, self._folder / TRIALS / name, settings):
                return

    def _finish(self, trial: optuna.Trial, folder: Path, settings: Mapping[str, str]) -> bool:
        """Train a trial and tell the study; return whether it counts as one of the sweep's."""
        said = ", ".join(f"{name} {value}" for name, value in settings.items())
        self._say(f"trial {trial.number}: {said}")
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        command = self._launch.train(
            self._config.recipe, folder / RUN, [*self._config.words, *words]
        )
        folder.mkdir(exist_ok=True)
        try:
            metrics = self._train(trial, command, folder)
        except Ended:
            self.study.tell(trial, state=TrialState.PRUNED)
            self._say(f"trial {trial.number}: ended early, below the median of the others")
            return True
        except (StageError, ValueError) as error:
            self.study.tell(trial, state=TrialState.FAIL)
            with self._lock:
                self._failures += 1
                if self._failures >= _FAILURES:
                    raise ValueError(
                        f"{_FAILURES} trials failed one after the other, the last one because: "
                        f"{error}"
                    ) from error
            self._say(f"trial {trial.number}: failed, another one takes its place: {error}")
            return False
        value = metrics.get(self._config.metric)
        if value is None:
            self.study.tell(trial, state=TrialState.FAIL)
            raise ValueError(f"--metric: {self._config.metric} is not defined on the test rows")
        with self._lock:
            self._failures = 0
        trial.set_user_attr(self._config.metric, value)
        self.study.tell(trial, self._score(value))
        self._say(f"trial {trial.number}: {self._config.metric} {value:.4f}")
        return True

    def _train(self, trial: optuna.Trial, command: Sequence[str], folder: Path) -> dict[str, Any]:
        """Return the metrics of a trial's run; it is trained unless it has been.

        Raises:
            Ended: it was pruned.
        """
        path = folder / RUN / "metrics.json"
        seen: set[int] = set()

        def bad() -> bool:
            for record in read_steps(folder / RUN / "evaluations.jsonl"):
                value = record.get(self._config.metric)
                if not isinstance(value, float) or record["step"] in seen:
                    continue
                seen.add(record["step"])
                trial.report(self._score(value), len(seen) - 1)
            return bool(seen) and self._config.prune and trial.should_prune()

        if not path.is_file():
            self._launch.start(command, folder / LOG, lambda line: None, stop=bad)
        return read_json(path)
