# SPDX-License-Identifier: MIT
"""Which files a folder holds: the one walk that training, ingestion, schema and deliveries share.

Every real file is found once. Links to files and folders are followed; a link that leads back, or
to something that has been found already, adds nothing. Names that begin with '.' or '_' are passed
over, because writers use them for what is not data yet. Folders of table formats (Delta Lake,
Apache Iceberg, Apache Hudi) are refused: they also hold files that are no longer part of the table.
"""

from __future__ import annotations

import datetime
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

PARQUET = (".parquet", ".parq", ".pq")
# Hive-style names of partitions by day.
_DAY = re.compile(r"(?:dt|date|day|ds)=(\d{4}-\d{2}-\d{2})")
_DAY_NAME = re.compile(r"dt=([\d-]+)")
_ICEBERG = re.compile(r"\.metadata\.json(\.gz)?$")
# Characters that end a line or steer a terminal; surrogates stand for bytes that are not UTF-8.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def list_files(root: str | Path) -> list[str]:
    """Return every regular file below the folder `root` once, in order of path.

    Of several paths to the same file the one without links wins, then one inside a day's folder.

    Raises:
        ValueError: a folder of a table format, a link to nothing, or a folder that cannot be read.
    """
    refuse_table(root)
    found: dict[object, str] = {}
    folders: set[str] = set()
    # Real folders first, so that a file's own path is preferred to one through a link.
    waiting = [os.fspath(root)]
    while waiting:
        waiting.sort(key=lambda path: (not day_of(os.path.join(path, "x")), path), reverse=True)
        start = waiting.pop()
        if os.path.realpath(start) not in folders:
            waiting += _walk(start, folders, found)
    return sorted(found.values())


def _walk(start: str, folders: set[str], found: dict[object, str]) -> list[str]:
    """Add the files below `start` to `found` and return the links that are still to follow."""
    links: list[str] = []
    pending = [start]
    while pending:
        folder = pending.pop()
        folders.add(os.path.realpath(folder))
        try:
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in entries)
        except OSError as error:
            raise ValueError(f"{printable(folder)}: cannot be read ({error.strerror})") from error
        table = table_format(names)
        if table:
            raise _refused(folder, table)
        if "metadata" in names and not os.path.islink(os.path.join(folder, "metadata")):
            refuse_table(folder)
        for name in names:
            if name.startswith((".", "_")):
                continue
            path = os.path.join(folder, name)
            if os.path.islink(path):
                links.append(path)
            elif os.path.isdir(path):
                pending.append(path)
            else:
                _add_file(path, found)
    return _follow(links, found)


def _follow(links: list[str], found: dict[object, str]) -> list[str]:
    """Add the files that `links` lead to; return the links that lead to folders."""
    folders = []
    for path in sorted(links, key=lambda link: (not day_of(link), link)):
        if os.path.isdir(path):
            folders.append(path)
        elif os.path.exists(path):
            _add_file(path, found)
        else:
            raise ValueError(
                f"{printable(path)}: expected a file or a folder, got a link to nothing; mend the "
                "link or remove it"
            )
    return folders


def _add_file(path: str, found: dict[object, str]) -> None:
    """Add a regular file, unless it has been found under another name."""
    status = os.stat(path)
    if stat.S_ISREG(status.st_mode):
        key = (status.st_dev, status.st_ino) if status.st_nlink > 1 else os.path.realpath(path)
        found.setdefault(key, path)


def refuse_table(root: str | Path) -> None:
    """Refuse a folder that is, or lies in, a table of Delta Lake, Apache Iceberg or Apache Hudi.

    Raises:
        ValueError: it is one; the format and a way out are named.
    """
    folder = os.path.abspath(root)
    while True:
        found = table_format(_names(folder))
        if not found and any(map(_ICEBERG.search, _names(os.path.join(folder, "metadata")))):
            found = "Apache Iceberg"
        if found:
            raise _refused(folder, found)
        # A partition or the data folder of a table is not a log either.
        name = os.path.basename(folder)
        if "=" not in name and name != "data":
            return
        folder = os.path.dirname(folder)


def table_format(names: Iterable[str]) -> str:
    """Return the table format that the names in a folder are those of, or an empty string."""
    marks = set(names)
    if "_delta_log" in marks:
        return "Delta Lake"
    if ".hoodie" in marks or ".hoodie_partition_metadata" in marks:
        return "Apache Hudi"
    return ""


def _refused(folder: str, table: str) -> ValueError:
    library = {"Delta Lake": "deltalake", "Apache Iceberg": "pyiceberg"}.get(table, "Spark")
    return ValueError(
        f"{printable(folder)}: expected a folder of plain files, got a table of {table}, which "
        "also keeps files of older versions, so that rows would count twice; export the current "
        f"version with {library} as plain Parquet, and use that folder"
    )


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def day_of(path: str | Path) -> str:
    """Return the day of the innermost partition by day in `path`, or an empty string.

    A partition by day is a folder dt=YYYY-MM-DD, or date=, day= or ds= with such a day.

    Raises:
        ValueError: a folder dt= has digits that are no day.
    """
    for part in reversed(Path(os.path.abspath(path)).parts[:-1]):
        day = day_of_name(part)
        if day:
            return day
    return ""


def day_of_name(name: str) -> str:
    """Return the day that the name of a folder gives, or an empty string.

    Raises:
        ValueError: the name is dt= and digits that are no day.
    """
    match = _DAY.fullmatch(name)
    if match:
        try:
            return datetime.date.fromisoformat(match[1]).isoformat()
        except ValueError:
            pass
    wrong = _DAY_NAME.fullmatch(name)
    if wrong:
        raise ValueError(
            f"folder {printable(name)!r}: expected dt=YYYY-MM-DD with a day of the calendar, got "
            f"{printable(wrong[1])!r}; rename the folder"
        )
    return ""


def is_parquet(name: str) -> bool:
    """Return whether a file's name is that of Parquet."""
    return name.lower().endswith(PARQUET)


def printable(text: str | Path) -> str:
    """Return a name with escapes for what would end a line or is not UTF-8.

    A file can be called anything; a message must stay one line, and must be encodable.
    """
    return _UNPRINTABLE.sub(_escape, os.fspath(text))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def openable(path: str) -> str | pa.NativeFile:
    """Return what pyarrow can open a path by; it takes a name that is not UTF-8 only as bytes."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return pa.OSFile(os.fsencode(path))
    return path


def partition_keys(path: str | Path) -> Iterator[tuple[str, str]]:
    """Yield the (column, value) that folders such as country=US in `path` stand for."""
    for part in Path(os.path.abspath(path)).parts[:-1]:
        column, cut, value = part.partition("=")
        if cut and column:
            yield column, value
