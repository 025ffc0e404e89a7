# SPDX-License-Identifier: MIT
"""What a sweep may change: settings with ranges or choices, as words of the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from embeddings.schema.plain import suggest
from trainer.config.overrides import Kind

if TYPE_CHECKING:
    import optuna

# What is tuned when nothing is named: what moves a ranking model most.
DEFAULT = (
    "dense.learning-rate=2e-4:5e-3:log",
    "sparse.learning-rate=2e-3:1e-1:log",
    "model.tokenizer.field-dropout=0:0.5",
)
_FORM = "expected SETTING=LOW:HIGH, SETTING=LOW:HIGH:log or SETTING=CHOICE,CHOICE,..."


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A setting and the values that it may take.

    Args:
        setting: its name, as `dense.learning-rate`.
        choices: its values; empty if there is a range.
        low: the least value.
        high: the largest value.
        log: whether values are drawn evenly by their logarithm.
        whole: whether values are integers.
    """

    setting: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    def draw(self, trial: optuna.Trial) -> str:
        """Return the value of a trial, as a word of the command line."""
        if self.choices:
            return str(trial.suggest_categorical(self.setting, self.choices))
        if self.whole:
            low, high = int(self.low), int(self.high)
            return str(trial.suggest_int(self.setting, low, high, log=self.log))
        return repr(trial.suggest_float(self.setting, self.low, self.high, log=self.log))


def parse_space(texts: Sequence[str], kinds: Mapping[str, Kind]) -> tuple[Tuned, ...]:
    """Return the settings that a sweep changes.

    Args:
        texts: as `DEFAULT`.
        kinds: what each setting of the recipe expects, by its name.

    Raises:
        ValueError: a text of another form, or a setting that does not exist or is no number.
    """
    found: dict[str, Tuned] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        setting = name.strip().lstrip("-").replace("_", "-")
        kind = kinds.get(f"--{setting}")
        if not equals or not values:
            raise ValueError(f"--tune {text}: {_FORM}, got {text!r}")
        if kind is None:
            names = [one.lstrip("-") for one in kinds]
            raise ValueError(f"--tune: unknown setting {setting!r}{suggest(setting, names)}")
        if setting in found:
            raise ValueError(f"--tune: {setting} is named twice; remove one")
        found[setting] = _parse(setting, values, kind)
    return tuple(found.values())


def _parse(setting: str, values: str, kind: Kind) -> Tuned:
    if ":" not in values:
        choices = tuple(values.split(","))
        if len(choices) < 2 or not all(choices) or len(set(choices)) < len(choices):
            raise ValueError(f"--tune {setting}: expected two choices or more, got {values!r}")
        return Tuned(setting=setting, choices=choices)
    low, high, *rest = values.split(":")
    if kind not in ("int", "float"):
        raise ValueError(f"--tune {setting}: a range needs a number; name choices with commas")
    try:
        ends = (int(low), int(high)) if kind == "int" else (float(low), float(high))
    except ValueError:
        raise ValueError(f"--tune {setting}: {_FORM}, got {values!r}") from None
    log = rest == ["log"]
    if rest not in ([], ["log"]) or not all(map(math.isfinite, ends)) or ends[0] >= ends[1]:
        raise ValueError(f"--tune {setting}: {_FORM} with LOW below HIGH, got {values!r}")
    if log and ends[0] <= 0:
        raise ValueError(f"--tune {setting}: a logarithm needs LOW above 0, got {low}")
    return Tuned(setting=setting, low=ends[0], high=ends[1], log=log, whole=kind == "int")


def words_of(params: Mapping[str, Any]) -> list[str]:
    """Return a trial's settings as words of the command line."""
    return [word for name, value in params.items() for word in (f"--{name}", _word(value))]


def _word(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)
