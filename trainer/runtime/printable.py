# SPDX-License-Identifier: MIT
"""Text from outside (names of files, values in configurations) made safe for logs and terminals.

A line break in a file's name would begin a line of its own in a log, and an escape code would move
the cursor of a terminal. Both are shown as escapes instead: `\\n`, `\\x1b`. Passwords of URLs are
left out.
"""

from __future__ import annotations

from trainer.runtime.credentials import without_credentials


def printable(text: str) -> str:
    """Return `text` in one line, with every character that cannot be printed as its escape."""
    text = without_credentials(text)
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def printable_lines(text: str) -> str:
    """Return lines of text, each `printable`; all but the first are indented by four spaces.

    So that no line but the first can pass for the beginning of a message.
    """
    text = without_credentials(text)
    return "\n    ".join(printable(line) for line in text.expandtabs(4).split("\n"))
