# SPDX-License-Identifier: MIT
"""YAML that people write, read without surprises: repeated keys, alias bombs and depth are errors.

PyYAML keeps the last of repeated keys, and repeats what an alias names as often as it is used, so
that 300 bytes can stand for 10^9 values. Here the nodes are checked before any value is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

MAX_BYTES = 4 << 20
_MAX_NODES = 200_000
_MAX_DEPTH = 50


def load_yaml(path: str | Path) -> Any:
    """Return what a YAML file holds, as dicts, lists and scalars.

    Raises:
        ValueError: the file cannot be read, is no YAML, repeats a key, nests too deep or, with its
            aliases expanded, is too large; file and line are named.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"{path}: expected YAML of at most {MAX_BYTES:,} bytes, got more")
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected YAML in UTF-8, cannot read it: {error}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Any:
    """Return what YAML text holds; see `load_yaml`. `source` names it in messages."""
    import yaml

    # The parser in C, where PyYAML was built with it.
    kind = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_depth(yaml, kind, text, source)
        loader = kind(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_nodes(yaml, node, source)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    except (ValueError, OverflowError, RecursionError) as error:
        message = " ".join(str(error).split())[:300]
        if message.startswith(source):
            raise
        # Such as a date that is not in the calendar, or a number of 5,000 digits.
        raise ValueError(
            f"{source}: a value cannot be read as YAML means it ({message}); write it in quotes if "
            "it is text"
        ) from error


def _check_depth(yaml: Any, kind: Any, text: str, source: str) -> None:
    """Refuse deep nesting before anything recurses into it."""
    depth = 0
    for event in yaml.parse(text, Loader=kind):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                line = event.start_mark.line + 1
                raise ValueError(
                    f"{source}, line {line}: expected at most {_MAX_DEPTH} levels, got more"
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _check_nodes(yaml: Any, root: Any, source: str) -> None:
    """Refuse repeated keys, and aliases that repeat too much or hold themselves."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: Any) -> int:
        """Return how many nodes one stands for with its aliases expanded."""
        known = sizes.get(id(node))
        if known is not None:
            return known
        line = node.start_mark.line + 1
        if id(node) in open_nodes:
            raise ValueError(f"{source}, line {line}: expected data, got an alias inside itself")
        open_nodes.add(id(node))
        total = 1
        if isinstance(node, yaml.MappingNode):
            _check_keys(yaml, node, source)
            total += sum(size(part) for pair in node.value for part in pair)
        elif isinstance(node, yaml.SequenceNode):
            total += sum(size(part) for part in node.value)
        if total > _MAX_NODES:
            raise ValueError(
                f"{source}, line {line}: expected at most {_MAX_NODES:,} values, got more with its "
                "aliases (*) expanded; write the values out"
            )
        open_nodes.discard(id(node))
        sizes[id(node)] = total
        return total

    size(root)


def _check_keys(yaml: Any, node: Any, source: str) -> None:
    """Refuse a mapping that has a key twice."""
    seen: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        name, line = (key.tag, key.value), key.start_mark.line + 1
        if name in seen:
            raise ValueError(
                f"{source}, line {line}: key {key.value[:80]!r} is already given in line "
                f"{seen[name]}; keep one of the two"
            )
        seen[name] = line
