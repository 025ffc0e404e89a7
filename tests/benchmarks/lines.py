# SPDX-License-Identifier: MIT
"""Lines of Python by package, of a commit and of the working tree: all, and those of code alone.

    python -m tests.benchmarks.lines [COMMIT]

Lines of code are those that are neither empty, nor a comment, nor part of a docstring.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("embeddings", "models", "trainer", "pipelines", "deploy", "tests")
_NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
)


def code_lines(source: str) -> int:
    """Return the number of lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            lines -= set(range(text.lineno, (text.end_lineno or 0) + 1))
    return len(lines)


def sources(package: str, commit: str = "") -> Iterator[str]:
    """Yield the text of a package's tracked files, of the working tree or of a commit."""
    words = ["git", "ls-tree", "-r", "--name-only", commit, f"{package}/"]
    words = words if commit else ["git", "ls-files", package]
    names = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in (name for name in names if name.endswith(".py")):
        if commit:
            show = ["git", "show", f"{commit}:{name}"]
            yield subprocess.run(show, capture_output=True, text=True, check=True).stdout
        elif Path(name).is_file():
            yield Path(name).read_text(encoding="utf-8")


def counts(package: str, commit: str = "") -> tuple[int, int]:
    """Return all lines of a package, and those of code."""
    texts = list(sources(package, commit))
    return sum(text.count("\n") for text in texts), sum(map(code_lines, texts))


def main() -> int:
    """Print the table."""
    commit = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    print(f"| package | lines, {commit} | lines | code, {commit} | code |\n|---|---|---|---|---|")
    for package in PACKAGES:
        (before, code_before), (after, code) = counts(package, commit), counts(package)
        print(f"| {package} | {before:,} | {after:,} | {code_before:,} | {code:,} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
