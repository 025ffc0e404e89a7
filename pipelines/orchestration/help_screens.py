# SPDX-License-Identifier: MIT
"""Help that fits a screen: what most people set is explained, the rest is named.

--help explains the first groups of options and names those of the others; --help-all explains all.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Collection
from typing import Any

_WIDTH = 98


def add_help(parser: argparse.ArgumentParser, named: Collection[str]) -> None:
    """Add -h, --help and --help-all to a parser that was made with `add_help=False`.

    Args:
        named: titles, up to a colon, of the groups of options that --help only names.
    """
    add = parser.add_argument
    add("-h", "--help", action=_Brief, const=tuple(named), help="this page")
    add("--help-all", action="help", help="every option explained")


class _Brief(argparse.Action):
    """Print the page and end."""

    def __init__(self, option_strings: list[str], dest: str, const: Any, help: str) -> None:
        nothing = argparse.SUPPRESS
        super().__init__(option_strings, nothing, nargs=0, const=const, default=nothing, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print the page and end."""
        print(brief(parser, self.const), end="")
        parser.exit()


def brief(parser: argparse.ArgumentParser, named: Collection[str]) -> str:
    """Return usage, description and the options of all groups that are not in `named`."""
    formatter, lines = parser._get_formatter(), list[str]()
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    formatter.add_text(parser.description)
    for group in parser._action_groups:
        title = (group.title or "").partition(":")[0]
        if title in named:
            words = " ".join(action.option_strings[-1] for action in group._group_actions)
            lines += textwrap.wrap(
                f"{title}: {words}",
                _WIDTH,
                initial_indent="  ",
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
        else:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
    more = ["", "explained by --help-all:", *lines, ""] if lines else []
    return formatter.format_help() + "\n".join(more)
