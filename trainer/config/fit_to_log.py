# SPDX-License-Identifier: MIT
"""Fits a recipe to another log: drops settings of columns and days that the log lacks.

With a schema and a path alone a run should start. So what a recipe says of tables and fields that
the schema lacks is dropped, a stream is made as long as the longest history, and where no days are
chosen, or only the recipe's and the log has none of them, the last day tests, or as many of the
last days as hold enough rows. Whatever the command line says itself is taken as it is.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embeddings.schema.schema import Schema
from models.tower import StreamTowerConfig
from trainer.config.config import DataConfig, TrainConfig
from trainer.data.files import column_names, days_of, last_days
from trainer.data.splits import days_within, parse_days, parse_rows
from trainer.runtime.atomic_files import read_json
from trainer.runtime.printable import printable

_CHOICES = ("train_days", "test_days", "train_rows", "test_rows")
_TEST_SHARE = 0.2
# So many of the last days test as hold so many rows, or such a share of the log's rows.
_TEST_ROWS, _LEAST_TEST_SHARE = 10_000, 0.05
# The rows that early stopping takes from training, and their share where there is one day.
_VALIDATION = ("train_days", "train_rows", "validation_days", "validation_rows")
_VALIDATION_SHARE = 0.1
_NAMES_SHOWN = 8


def fit_recipe(config: TrainConfig, schema: Schema) -> TrainConfig:
    """Return `config` with `schema`, and without what it says of columns that `schema` lacks.

    Raises:
        ValueError: the sections do not fit each other, as in `TrainConfig`.
    """
    tables = {table.name for table in schema.tables}
    sparse = dataclasses.replace(
        config.sparse,
        **{
            name: {
                key: value for key, value in getattr(config.sparse, name).items() if key in tables
            }
            for name in ("table_learning_rates", "table_eps")
        },
    )
    model = config.model
    context = {
        one.name for one in schema.sparse if one.side == "context" and one.kind != "sequence"
    }
    context |= {one.name for one in schema.dense}
    kept = tuple(name for name in model.tokenizer.stream_fields if name in context)
    fields = {one.name for one in schema.sparse}
    rates = {k: v for k, v in model.tokenizer.field_dropout_rates.items() if k in fields}
    tokenizer = dataclasses.replace(model.tokenizer, stream_fields=kept, field_dropout_rates=rates)
    model = dataclasses.replace(model, tokenizer=tokenizer)
    if len(model.head.prior) > 1 and len(model.head.prior) != len(schema.labels):
        model = dataclasses.replace(model, head=dataclasses.replace(model.head, prior=()))
    if isinstance(model.tower, StreamTowerConfig):
        longest = max(
            (one.max_length for one in schema.sparse if one.kind == "sequence"), default=1
        )
        length = max(model.tower.max_length, longest)
        model = dataclasses.replace(
            model, tower=dataclasses.replace(model.tower, max_length=length)
        )
    return dataclasses.replace(config, schema=schema, sparse=sparse, model=model)


def check_schema(config: TrainConfig) -> None:
    """Check that a log which is read by a recipe's own schema has the columns of that schema.

    Raises:
        ValueError: it lacks some; most likely the log's own schema was forgotten.
    """
    if config.data.schema or not config.data.path:
        return
    held, needed = column_names(config.data.path), list(config.schema.columns)
    missing = [name for name in needed if name not in held]
    if held and missing:
        raise ValueError(
            f"data.schema: the log lacks {len(missing)} of the {len(needed)} columns that the "
            f"schema of recipe {config.recipe} names ({_listed(missing)}); it has {_listed(held)}. "
            f"Pass the schema of this log by --data.schema FILE; `python -m pipelines.schema "
            f"{shlex.quote(config.data.path)} --output schema.yaml` proposes one"
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    shown = ", ".join(printable(name) for name in names[:_NAMES_SHOWN])
    return shown + (f" and {more} more" if more > 0 else "")


def choose_split(config: TrainConfig, recipe: DataConfig, output: Path) -> tuple[TrainConfig, str]:
    """Return `config` with the rows that train and test where nobody has chosen them, and a note.

    The log's last day tests and the others train. Without days, the last fifth of the rows tests,
    in
    file order. Days from the recipe, not from the command line, belong to the recipe's own log.
    They
    are dropped with a schema of the user's, or if the log has none of them. A run that has begun in
    `output` keeps its choice, as days may have been added since.

    Args:
        config: of the run, with the command line's settings.
        recipe: the recipe's data section, without the settings of the command line (`unsaid`).
        output: the run's folder.

    Raises:
        ValueError: data.path holds no log.
    """
    data = config.data
    if not data.path or data.allow_overlap:
        return config, ""
    days = [day for day in days_of(data.path) if day]
    own = [name for name in ("train_days", "test_days") if _is_own(data, recipe, name)]
    other_log = bool(data.schema) and data.schema != recipe.schema
    gone = own if other_log else [name for name in own if not _has(days, data, name)]
    # Where one of the two is not there, the other is a part of another log's plan.
    found = dataclasses.replace(data, **dict.fromkeys(own if gone else (), ""))
    why = "are of another log than this schema's" if other_log else "are not in the log"
    notes = [f"the recipe's {name} ({getattr(data, name)}) {why}" for name in gone]
    begun = _begun(output, data)
    said = any(getattr(data, name) for name in _CHOICES if name not in own)
    if begun is not None and not said:
        found = dataclasses.replace(found, **begun)
        if found == data:
            return config, ""
    if found == data and any(getattr(data, name) for name in _CHOICES) and not _half(data):
        return config, ""
    if begun is not None:
        found = dataclasses.replace(found, **begun)
    elif not found.test_path:
        found = dataclasses.replace(found, **_missing(found, days))
    if found == data:
        return config, ""
    chosen = [f"{name} {getattr(found, name)}" for name in _CHOICES if getattr(found, name)]
    notes.append(f"rows chosen: {', '.join(chosen) or 'all'}")
    return dataclasses.replace(config, data=found), "; ".join(notes)


def choose_validation(config: TrainConfig, output: Path) -> tuple[TrainConfig, str]:
    """Return `config` with validation rows if early stopping needs some, and a note.

    They are taken from the training rows: the last day, or the last tenth of the rows where there
    is one day, or shares are chosen. A run that has begun in `output` keeps its choice.

    Args:
        config: of the run, with its training and test rows chosen.
        output: the run's folder.

    Raises:
        ValueError: data.path holds no log.
    """
    data = config.data
    if not (config.early_stopping.patience and data.path) or data.validates:
        return config, ""
    begun = _begun(output, data, _VALIDATION) or {}
    same = all(begun.get(name) == getattr(data, name) for name in _VALIDATION[:2])
    chosen = begun if same and any(begun.values()) else _validation(data)
    found = dataclasses.replace(data, **chosen)
    of_days = f" of {found.validation_days}" if found.validation_days else ""
    rows = f"rows {found.validation_rows}" if found.validation_rows else "all rows"
    note = f"early stopping validates on {rows}{of_days}, which do not train"
    return dataclasses.replace(config, data=found), note


def _validation(data: DataConfig) -> dict[str, str]:
    """Return training rows and validation rows, of those that train in `data`."""
    days = days_within(days_of(data.path), parse_days(data.train_days))
    if len(days) > 1 and not data.train_rows:
        return {"train_days": f"{days[0]}:{days[-2]}", "validation_days": days[-1]}
    start, stop = parse_rows(data.train_rows)
    cut = f"{stop - _VALIDATION_SHARE * (stop - start):g}"
    return {
        "train_rows": f"{start:g}:{cut}",
        "validation_days": data.train_days,
        "validation_rows": f"{cut}:{stop:g}",
    }


def unsaid(recipe: DataConfig, arguments: Sequence[str]) -> DataConfig:
    """Return a recipe's data section without the days that the command line gives, too.

    What the command line says holds, even if it says the same as the recipe.
    """
    words = {word.partition("=")[0].replace("_", "-") for word in arguments}
    said = [name for name in _CHOICES if f"--data.{name}".replace("_", "-") in words]
    return dataclasses.replace(recipe, **dict.fromkeys(said, ""))


def _is_own(data: DataConfig, recipe: DataConfig, name: str) -> bool:
    """Return whether days are the recipe's, and not the command line's."""
    return bool(getattr(recipe, name)) and getattr(recipe, name) == getattr(data, name)


def _has(days: Sequence[str], data: DataConfig, name: str) -> bool:
    """Return whether the log (that of the test, if it is another) has one of the days of `name`."""
    if name == "test_days" and data.test_path:
        days = [day for day in days_of(data.test_path) if day]
    first, last = parse_days(getattr(data, name)) or ("", "")
    return any(first <= day <= last for day in days)


def _half(data: DataConfig) -> bool:
    """Return whether the rows of only one of training and test are chosen."""
    train = data.train_days or data.train_rows
    test = data.test_days or data.test_rows or data.test_path
    return not (train and test)


def _missing(data: DataConfig, days: Sequence[str]) -> dict[str, str]:
    """Return the choices that `data` leaves open, as far as `days` allow."""
    train, test = parse_days(data.train_days), parse_days(data.test_days)
    if train and not test and not data.test_rows:
        later = [day for day in days if day > train[1]]
        return {"test_days": later[0]} if later else {}
    if test and not train and not data.train_rows:
        before = [day for day in days if day < test[0]]
        return {"train_days": f"{before[0]}:{before[-1]}"} if before else {}
    if data.train_rows and not data.test_rows:
        start, stop = parse_rows(data.train_rows)
        return {"test_rows": f"{stop:g}:1"} if stop < 1 else {"test_rows": f"0:{start:g}"}
    if data.test_rows and not data.train_rows:
        start, stop = parse_rows(data.test_rows)
        return {"train_rows": f"0:{start:g}"} if start > 0 else {"train_rows": f"{stop:g}:1"}
    if len(days) > 1:
        tested = last_days(data.path, days, _TEST_ROWS, _LEAST_TEST_SHARE)
        rest = days[: max(len(days) - len(tested), 1)]
        tested = days[len(rest) :]
        test = tested[0] if len(tested) == 1 else f"{tested[0]}:{tested[-1]}"
        return {"train_days": f"{rest[0]}:{rest[-1]}", "test_days": test}
    cut = f"{1 - _TEST_SHARE:g}"
    return {"train_rows": f"0:{cut}", "test_rows": f"{cut}:1"}


def _begun(
    output: Path, data: DataConfig, names: Sequence[str] = _CHOICES
) -> dict[str, Any] | None:
    """Return the choices of the run that has begun in `output` on the same log, if there is one."""
    path = output / "config.json"
    try:
        old = read_json(path)["data"]
        same = old["path"] == data.path and old["test_path"] == data.test_path
        return {name: old[name] for name in names} if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # there is none, or `run_folder.claim` says what is wrong with it
