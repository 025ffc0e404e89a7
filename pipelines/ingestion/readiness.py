# SPDX-License-Identifier: MIT
"""Which days of a log are ready: a mark says that a day is whole.

  manifest    DAY/_manifest.json, which `pipelines.ingest` writes last
  success     DAY/_SUCCESS, which Spark and Hadoop write last
  watermark   _watermark beside the days: a day, or a time in ISO 8601, up to which all is there
  rows        Parquet files with at least so many rows together
  files       any file: only for logs that nobody is writing to

DAY is a folder dt=YYYY-MM-DD below the log's, on a disk or behind a URL that fsspec knows.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.ingestion.partition import MANIFEST, day_of_path
from trainer.checkpoint.storage import Folder, locate
from trainer.data.discovery import list_files

MARKS = ("manifest", "success", "watermark", "rows", "files")
SUCCESS, WATERMARK = "_SUCCESS", "_watermark"


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """What makes a day ready.

    Args:
        mark: one of MARKS.
        min_rows: of the mark `rows`.
    """

    mark: str = "manifest"
    min_rows: int = 0

    def __post_init__(self) -> None:
        """Check that the two fit together."""
        if self.mark not in MARKS:
            raise ValueError(f"--ready: expected one of {', '.join(MARKS)}, got {self.mark!r}")
        if (self.mark == "rows") != (self.min_rows > 0):
            raise ValueError(
                f"--ready-rows: expected a number > 0 with --ready rows and none otherwise, got "
                f"{self.min_rows} with --ready {self.mark}"
            )

    def describe(self) -> str:
        """Say what a day needs, and where another mark is chosen."""
        needed = {
            "manifest": f"a day is ready with its {MANIFEST}",
            "success": f"a day is ready with its {SUCCESS}",
            "watermark": f"a day is ready when {WATERMARK} has passed it",
            "rows": f"a day is ready with {self.min_rows:,} rows in its Parquet files",
            "files": "a day is ready with any file",
        }[self.mark]
        others = ", ".join(mark for mark in MARKS if mark != self.mark)
        return f"{needed}; --ready chooses another mark: {others}"

    def days(self, log: str) -> list[str]:
        """Return the days of a log that are ready, in order.

        Raises:
            ValueError: the log is no folder, or its watermark is neither a day nor a time.
        """
        root = locate(log)
        if not root.is_dir():
            raise ValueError(f"{log}: expected a folder of days dt=YYYY-MM-DD, got none")
        folders = {day: path for path in root.iterdir() if (day := day_of_path(path.name))}
        passed = _read_watermark(root / WATERMARK) if self.mark == "watermark" else ""
        return [day for day in sorted(folders) if self._is_ready(day, folders[day], passed)]

    def _is_ready(self, day: str, folder: Folder, passed: str) -> bool:
        if self.mark == "manifest":
            return (folder / MANIFEST).is_file()
        if self.mark == "success":
            return (folder / SUCCESS).is_file()
        files = files_of(folder)
        if self.mark == "watermark":
            return bool(files) and day <= passed
        if self.mark == "rows":
            return sum(map(_count_rows, files)) >= self.min_rows
        return bool(files)


def files_of(folder: Folder) -> list[Folder]:
    """Return the files of a day, at any depth and in order, without those that are marks.

    On a disk each real file once, through links too (`trainer/data/discovery.py`).
    """
    if isinstance(folder, Path):
        return [Path(path) for path in list_files(folder)]
    found: list[Folder] = []
    for path in sorted(folder.iterdir(), key=str):
        if path.name.startswith((".", "_")):
            continue
        found += files_of(path) if path.is_dir() else [path]
    return found


def _count_rows(path: Folder) -> int:
    """Return the rows of a Parquet file by its footer; 0 for one that is not finished."""
    try:
        with path.open("rb") as file:
            return pq.ParquetFile(file).metadata.num_rows
    except (pa.ArrowException, OSError):
        return 0


def _read_watermark(path: Folder) -> str:
    """Return the last day that is whole; an empty text where there is no watermark yet."""
    if not path.is_file():
        return ""
    text = path.read_text(encoding="utf-8").strip()
    try:
        if len(text) == len("YYYY-MM-DD"):
            return datetime.date.fromisoformat(text).isoformat()
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{path}: expected a day YYYY-MM-DD or a time in ISO 8601, got {text[:40]!r}"
        ) from None
    if moment.tzinfo is not None:
        moment = moment.astimezone(datetime.UTC)
    # A time stands inside its own day, so that the one before it is the last whole one.
    return (moment.date() - datetime.timedelta(days=1)).isoformat()
