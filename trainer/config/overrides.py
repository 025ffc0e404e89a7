# SPDX-License-Identifier: MIT
"""Settings as a command line gives them: their names, what each expects, and a short list of them.

A setting is a field of nested dataclasses and is called --section.field, with hyphens. tyro applies
the words and prints the long help. Words are checked here first, for two reasons. tyro's messages
leave out what a number should have been and the closest choice, and report a value after a switch
as an unknown option. And tyro needs the dataclasses, hence torch: a check of plain data needs
neither, so a misspelt setting is answered at once (see `names.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from embeddings.schema.plain import suggest
from trainer.runtime.program import program

_WIDTH = 100
# Fields of a configuration that no word can set.
_FIXED = ("recipe", "schema")
# The name of the section of settings that lie in no section.
_ROOT = "run"
_OFTEN = (
    *("--epochs", "--data.path", "--data.schema", "--data.train-days", "--data.test-days"),
    *("--loader.global-batch-size", "--loader.num-workers", "--model.tokenizer.token-dim"),
    *("--dense.learning-rate", "--sparse.learning-rate", "--precision.dtype", "--runtime.seed"),
    *("--checkpoint.folder", "--checkpoint.interval-seconds", "--inherit.path", "--inherit.policy"),
)


# What a setting expects, as JSON can hold it: "bool", "int", "float" or "str"; a list of choices;
# {"each": kind} for any number of words; {"pairs": kind} for NAME VALUE pairs; "" for other types.
Kind = str | list[str] | dict[str, Any]


class Setting(NamedTuple):
    """A field: its name on the command line, its annotated type, its value."""

    name: str
    annotation: Any
    value: Any


def sections(config: Any) -> Iterator[tuple[Any, list[Setting]]]:
    """Yield each dataclass of `config`, itself first, and the settings that are its own fields."""

    def visit(value: Any, prefix: str) -> Iterator[tuple[Any, list[Setting]]]:
        kinds = typing.get_type_hints(type(value))
        own, inner = [], []
        for item in dataclasses.fields(value):
            if not prefix and item.name in _FIXED:
                continue
            child, path = getattr(value, item.name), f"{prefix}{item.name.replace('_', '-')}"
            if dataclasses.is_dataclass(child):
                inner.append((child, f"{path}."))
            else:
                own.append(Setting(f"--{path}", kinds[item.name], child))
        yield value, own
        for child, path in inner:
            yield from visit(child, path)

    yield from visit(config, "")


def setting_names(config: Any) -> list[str]:
    """Return every setting that can be overridden, as --section.field."""
    return [setting.name for _, own in sections(config) for setting in own]


def setting_kinds(config: Any) -> dict[str, Kind]:
    """Return what each setting expects, by its name, as plain data."""
    return {one.name: kind_of(one.annotation) for _, own in sections(config) for one in own}


def kind_of(annotation: Any) -> Kind:
    """Return an annotated type as plain data: see `Kind`."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return [str(choice) for choice in inner]
    if origin is tuple:
        return {"each": kind_of(inner[0])}
    if origin is dict:
        return {"pairs": kind_of(inner[1])}
    return annotation.__name__ if annotation in (bool, int, float, str) else ""


def check_words(known: Mapping[str, Kind], words: Sequence[str]) -> None:
    """Check that `words` are known settings, each followed by what it expects.

    Args:
        known: what each setting expects, by its name.
        words: of the command line, after the recipe.

    Raises:
        ValueError: an unknown setting, or a word that is no value of its setting; the message
            proposes the closest setting or value.
    """
    name, values = "", []
    for word in (*words, "--"):
        if not word.startswith("--"):
            values.append(word)
            continue
        if name:
            _check_values(name, known[name], values)
        elif values:
            raise ValueError(
                f"unexpected word {values[0]!r}: expected --section.field VALUE; "
                f"`{program('trainer.train')} RECIPE --help` lists the sections"
            )
        if word == "--":
            continue
        text, equals, value = word.partition("=")
        name, values = text.replace("_", "-"), [value] if equals else []
        negated = re.sub(r"(^--|\.)no-", r"\1", name)
        if name not in known and known.get(negated) == "bool":
            name = negated
        if name not in known:
            raise UnknownSettingError(_unknown(name, known), name)


class UnknownSettingError(ValueError):
    """No setting has this name. Attribute: name, such as --loader.batch."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


def _unknown(name: str, known: Mapping[str, Kind]) -> str:
    """Return what to answer to a name that is no setting."""
    if "accumul" in name:
        return (
            f"{name}: gradients are not accumulated over batches, because the tables' fused "
            "optimizers update a row once for each of them, which no larger batch does; raise "
            "--loader.batch-size, or train on more ranks"
        )
    own = name.rpartition(".")[2].lstrip("-")
    same = [one for one in known if one.rpartition(".")[2].lstrip("-") == own]
    meant = f", did you mean {same[0]!r}?" if len(same) == 1 else suggest(name, known)
    return (
        f"unknown setting {name}{meant}; `{program('trainer.train')} RECIPE --help SECTION` lists "
        "those of a section, --help the sections"
    )


def without_replaced(config: Any, words: Sequence[str]) -> Any:
    """Return `config` with every mapping emptied that `words` set.

    tyro turns a mapping that has pairs into one setting a pair, and then accepts neither the
    mapping's own name nor another key.

    Args:
        config: a dataclass of settings.
        words: of the command line.
    """
    given = {word.partition("=")[0].replace("_", "-") for word in words}

    def emptied(value: Any, prefix: str) -> Any:
        changes = {}
        for item in dataclasses.fields(value):
            child, name = getattr(value, item.name), f"{prefix}{item.name.replace('_', '-')}"
            if dataclasses.is_dataclass(child):
                inner = emptied(child, f"{name}.")
                changes |= {item.name: inner} if inner is not child else {}
            elif isinstance(child, dict) and child and name in given:
                changes[item.name] = {}
        return dataclasses.replace(value, **changes) if changes else value

    return emptied(config, "--")


def last_value(words: Sequence[str], name: str) -> str:
    """Return the last value that `words` give to the setting `name`, or an empty string."""
    value = ""
    for word, following in zip(words, [*words[1:], ""], strict=False):  # none: one is longer
        text, equals, rest = word.partition("=")
        if text == name:
            value = rest if equals else following
    return value


def describe_settings(config: Any) -> str:
    """Return all settings with their values, a paragraph a section."""
    return "\n".join(
        "\n".join([_summary(section), *_listed(own)]) for section, own in sections(config) if own
    )


def describe_sections(config: Any) -> str:
    """Return what is set most often with its value, and a line a section: name and meaning."""
    found = {_section_name(own): section for section, own in sections(config) if own}
    width = max(map(len, found))
    settings = [one for _, own in sections(config) for one in own if one.name in _OFTEN]
    room = _WIDTH - width - 4
    lines = [
        f"  {name:<{width}}  {textwrap.shorten(_summary(section), room, placeholder=' ...')}"
        for name, section in found.items()
    ]
    return "\n".join(["Set most often:", *_listed(settings), "", "Sections:", *lines])


def describe_section(config: Any, name: str) -> str:
    """Return what the settings of a section mean, and their values.

    Args:
        config: a dataclass of settings.
        name: of a section, as `describe_sections` lists it. The name of a group describes every
            section within it.

    Raises:
        ValueError: there is no such section.
    """
    found = {_section_name(own): (section, own) for section, own in sections(config) if own}
    chosen = [name] if name in found else [one for one in found if one.startswith(f"{name}.")]
    if not chosen:
        raise ValueError(
            f"--help {name}: expected a section, one of {', '.join(found)}{suggest(name, found)}"
        )
    parts = [
        "\n".join([f"{one}: {inspect.getdoc(type(section)) or ''}", "", *_listed(own)])
        for one, (section, own) in ((one, found[one]) for one in chosen)
    ]
    within = [one for one in found if one.startswith(f"{name}.")] if name in found else []
    return "\n\n".join([*parts, *([f"Within it: {', '.join(within)}"] if within else [])])


def _section_name(own: Sequence[Setting]) -> str:
    """Return the name of the section that holds these settings."""
    return own[0].name.rpartition(".")[0].lstrip("-") or _ROOT


def _summary(section: Any) -> str:
    return (inspect.getdoc(type(section)) or "").partition("\n")[0]


def _listed(own: Sequence[Setting]) -> list[str]:
    """Return settings with their values as lines; a setting and its value stay on one."""
    parts = [f"{one.name} {_written(one.value)}".replace(" ", "\0") for one in own]
    lines = textwrap.wrap(
        "  ".join(parts),
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def _check_values(name: str, kind: Kind, values: list[str]) -> None:
    """Check the words after one setting."""
    each, bad = kind, None
    if kind == "bool":
        bad = values[0] if values else None
    elif isinstance(kind, dict) and "each" in kind:
        each = kind["each"]
        bad = next((value for value in values if not _fits(each, value)), None)
    elif isinstance(kind, dict):
        each = kind["pairs"]
        bad = next((value for value in values[1::2] if not _fits(each, value)), None)
        bad = values[-1] if bad is None and len(values) % 2 else bad
        twice = next((one for one in values[::2] if values[::2].count(one) > 1), None)
        if bad is None and twice is not None:
            raise ValueError(f"{name}: expected each NAME once, got {twice!r} twice")
    elif len(values) != 1:
        found = " ".join(values) if values else "nothing"
        raise ValueError(f"{name}: expected {_expectation(kind)}, got {found}")
    elif not _fits(kind, values[0]):
        bad = values[0]
    if bad is not None:
        meant = suggest(bad, each if isinstance(each, list) else ())
        raise ValueError(f"{name}: expected {_expectation(kind)}, got {bad!r}{meant}")


def _fits(kind: Kind, word: str) -> bool:
    """Return whether a word is a value of a scalar kind."""
    if isinstance(kind, list):
        return word in kind
    if kind in ("int", "float"):
        try:
            (int if kind == "int" else float)(word)
        except ValueError:
            return False
    return True


def _expectation(kind: Kind) -> str:
    """Return in words what a setting expects."""
    if isinstance(kind, list):
        return f"one of {', '.join(map(repr, kind))}"
    if isinstance(kind, dict) and "each" in kind:
        return f"any number of words, each {_expectation(kind['each'])}"
    if isinstance(kind, dict):
        return f"pairs NAME VALUE, each VALUE {_expectation(kind['pairs'])}"
    names = {
        "bool": "no value (--x.y for on, --x.no-y for off)",
        "int": "an integer",
        "float": "a number",
        "str": "one word (quote spaces)",
    }
    return names.get(kind, "a value")


def _written(value: Any) -> str:
    """Return a value as a command line would have it."""
    if isinstance(value, bool):
        return "(on)" if value else "(off)"
    if isinstance(value, dict):
        value = tuple(word for pair in value.items() for word in pair)
    if isinstance(value, tuple | list):
        return " ".join(map(str, value)) or "()"
    return str(value) or "''"
