# SPDX-License-Identifier: MIT
"""Settings of the command line, applied to a recipe's configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Sequence

import tyro

from embeddings.schema.schema import load_schema
from trainer.config.config import TrainConfig
from trainer.config.fit_to_log import fit_recipe
from trainer.config.overrides import check_words, last_value, setting_kinds, without_replaced
from trainer.runtime.program import program


def apply_overrides(config: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """Return `config` with overrides such as --data.path X or --dense.learning-rate 0.01 applied.

    Raises:
        ValueError: an unknown setting or a value of the wrong type; the message proposes the
            closest setting.
    """
    if list(arguments) != ["--help"]:
        check_words(setting_kinds(config), arguments)
    # First, because the other settings may name its tables and fields.
    path = last_value(arguments, "--data.schema")
    if path:
        config = fit_recipe(config, load_schema(path))
    config = _choose_batch(config, arguments)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            config = tyro.cli(
                tyro.conf.AvoidSubcommands[TrainConfig],
                default=without_replaced(config, arguments),
                args=list(arguments),
                prog=f"{program('trainer.train')} RECIPE",
                console_outputs=True,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_refusal(stop, errors.getvalue())) from None
    if config.data.schema and config.data.schema != path:  # the recipe's own
        config = fit_recipe(config, load_schema(config.data.schema))
    return config


def _choose_batch(config: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """Return `config` with one size of a batch: of a rank or of all ranks, as the words say.

    Raises:
        ValueError: the words give both.
    """
    here, everywhere = "--loader.batch-size", "--loader.global-batch-size"
    given = [name for name in (here, everywhere) if last_value(arguments, name) not in ("", "0")]
    if len(given) == 2:
        raise ValueError(f"{here} is of a rank and {everywhere} of all ranks: expected one of them")
    if not given:
        return config
    # Words replace the 1.
    sizes = {"batch_size": 1, "global_batch_size": 0}
    if given == [everywhere]:
        sizes = {"batch_size": 0, "global_batch_size": 1}
    return dataclasses.replace(config, loader=dataclasses.replace(config.loader, **sizes))


def _refusal(stop: BaseException, printed: str) -> str:
    """Return why a section refused its values: its own words, or what tyro printed."""
    reason: BaseException | None = stop
    section = ""
    while reason is not None:
        if type(reason) is ValueError:
            message = str(reason)
            parts = "|".join(map(re.escape, section.split(".")))
            named = not section or re.match(rf"({parts})[.:]", message)
            return message if named else f"{section}.{message}"
        if len(reason.args) == 2 and isinstance(reason.args[1], str):
            section = reason.args[1]  # of tyro's error, around that of the section
        reason = reason.__cause__ or reason.__context__
    return "settings: " + " ".join(re.sub(r"[─│╭╮╰╯]+", " ", printed).split())
