# SPDX-License-Identifier: MIT
"""The map of the code names files, classes and functions that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAP = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
ROWS = [line for line in MAP.splitlines() if line.startswith("|") and ".py`" in line]


def defined(path: Path) -> set[str]:
    """Functions and classes of a file, and methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (inner for inner in node.body if isinstance(inner, ast.FunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_files_and_functions_that_exist(row: str) -> None:
    spans = re.findall(r"`([^`]+)`", row)
    files = [span for span in spans if span.endswith(".py")]
    assert all((ROOT / file).is_file() for file in files), files
    known = set().union(*(defined(ROOT / file) for file in files))
    assert set(spans) - set(files) <= known


def test_the_map_answers_what_newcomers_ask() -> None:
    for words in ("overflowed in FP16", "become complete", "id become a row", "is promoted"):
        (row,) = [row for row in ROWS if words in row]
        assert len(re.findall(r"`[^`]+`", row)) >= 2
