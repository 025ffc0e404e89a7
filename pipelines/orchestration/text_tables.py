# SPDX-License-Identifier: MIT
"""Aligned columns of text for the console and for logs.

Text from outside (reasons, names of files) stays in its line: see `trainer/runtime/printable.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.runtime.printable import printable


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines of aligned columns under a head."""
    lines = [tuple(printable(cell) for cell in line) for line in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([text[0], "-" * min(100, sum(widths) + 2 * len(widths)), *text[1:]])
