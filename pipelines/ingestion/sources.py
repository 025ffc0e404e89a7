# SPDX-License-Identifier: MIT
"""Which raw files there are: those that files, folders, globs and URLs stand for, each once."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelines.ingestion.formats import NAMES, format_of
from trainer.checkpoint.storage import Folder, locate
from trainer.data.discovery import list_files, printable, refuse_table, table_format

_SHOWN = 3


class Found(list[str]):
    """The paths of raw files, each once; `passed_over` are files whose names tell no format."""

    def __init__(self, files: Sequence[str], passed_over: Sequence[str] = ()) -> None:
        super().__init__(files)
        self.passed_over = list(passed_over)

    def note(self) -> str:
        """Say which files were passed over; empty if none was."""
        if not self.passed_over:
            return ""
        shown = ", ".join(printable(Path(path).name) for path in self.passed_over[:_SHOWN])
        more = ", ..." if len(self.passed_over) > _SHOWN else ""
        return (
            f"{len(self.passed_over)} files passed over, whose names tell no format: {shown}{more} "
            "(--format reads every file as one format)"
        )


def list_sources(sources: Sequence[str], format_: str = "") -> Found:
    """Return the files that files, folders, URLs and globs stand for, each once, by name.

    In folders, names that begin with '.' or '_' are left out, and without `format_` names that
    belong to no format are passed over.

    Raises:
        ValueError: a source is or holds no file, or a folder is one of a table format.
    """
    if format_ not in ("", *NAMES):
        raise ValueError(f"format: expected one of {', '.join(NAMES)}, got {format_!r}")
    found: dict[str, str] = {}
    passed_over: list[str] = []
    for source in sources:
        inside = []
        for path, is_named in _files(source):
            if is_named or format_ or format_of(path):
                inside.append(path)
            else:
                passed_over.append(path)
        if not inside:
            others = ", ".join(printable(Path(path).name) for path in passed_over[:_SHOWN])
            got = f"none of a known format ({others}); say --format" if others else "no file"
            raise ValueError(
                f"{printable(source)}: expected a file, a folder of logs or a glob, got {got}"
            )
        for path in inside:
            found.setdefault(path if "://" in path else os.path.realpath(path), path)
    return Found(list(found.values()), passed_over)


def _files(source: str) -> Iterator[tuple[str, bool]]:
    """Yield the files of a source, and whether they are named by it and not by a folder."""
    path = Path(source)
    if "://" in source:
        root = locate(source)
        if root.is_file():
            yield source, True
        else:
            yield from ((file, False) for file in _remote(root))
    elif path.is_dir():
        yield from ((file, False) for file in list_files(source))
    elif path.exists():
        refuse_table(path.parent)
        yield source, True
    else:
        for name in sorted(glob.glob(source, recursive=True)):
            if os.path.isfile(name):
                yield name, True
            elif os.path.isdir(name) and "**" not in source:
                yield from ((file, False) for file in list_files(name))


def _remote(folder: Folder) -> Iterator[str]:
    """Yield the files below a URL, by name."""
    entries = sorted(folder.iterdir(), key=str) if folder.is_dir() else []
    table = table_format(entry.name for entry in entries)
    if table:
        raise ValueError(
            f"{folder}: expected a folder of plain files, got a table of {table}; export its "
            "current version as plain Parquet, and use that folder"
        )
    for path in entries:
        if path.name.startswith((".", "_")):
            continue
        if path.is_dir():
            yield from _remote(path)
        else:
            yield str(path)
