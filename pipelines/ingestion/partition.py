# SPDX-License-Identifier: MIT
"""Date-partitioned Parquet that is either complete or absent.

Rows are appended in any order of days into a scratch folder; `commit` renames the finished days
into place and writes each day's manifest last. A day is ready if and only if its `_manifest.json`
exists, so a reader never sees half a day, whatever kills the writer.

  OUTPUT/dt=2026-01-01/part-00000.parquet   row groups of moderate size: the loader's unit
  OUTPUT/dt=2026-01-01/_statistics.json     per column: count, nulls, cardinality, mean, drift
  OUTPUT/dt=2026-01-01/_manifest.json       schema fingerprint, row counts, column types, few texts
"""

from __future__ import annotations

import fcntl
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.runtime.atomic_files import read_json, write_json

MANIFEST = "_manifest.json"
STATISTICS = "_statistics.json"
_SCRATCH = ".incomplete"
_REPLACED = "replaced-"
_DAY = re.compile(r"dt=(\d{4}-\d{2}-\d{2})")


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    """Layout of the days.

    Args:
        row_group_rows: rows of a row group.
        rows_per_file: rows after which a new file of the day begins.
        buffered_rows: largest number of rows of all days that are buffered in memory. Above it the
            day with most rows is flushed as a smaller row group, which bounds memory on unsorted
            logs.
        open_files: largest number of open files. Above it the file opened first is closed.
        overwrite: whether days that exist are replaced.
        scope: name of a writer. Writers of different scopes may write different days to the same
            output at the same time.
    """

    row_group_rows: int = 16_384
    rows_per_file: int = 1 << 20
    buffered_rows: int = 1 << 19
    open_files: int = 128
    overwrite: bool = False
    scope: str = ""

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("row_group_rows", "rows_per_file", "buffered_rows", "open_files"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def build(self, output: str | Path) -> Partitions:
        """Open `output` for writing; one process at a time. See `Partitions` for what is raised."""
        return Partitions(Path(output), self)


@dataclass
class _Day:
    """State of one day that is being written."""

    waiting: list[pa.Table] = field(default_factory=list)
    waiting_rows: int = 0
    rows: int = 0
    file_rows: int = 0
    writer: pq.ParquetWriter | None = None
    opened: int = 0
    files: list[str] = field(default_factory=list)


class Partitions:
    """The days being written under one folder; a context manager, which an exception discards.

    Raises:
        RuntimeError: another process is writing to the same folder.
    """

    def __init__(self, output: Path, config: PartitionConfig) -> None:
        self.output, self.config = output, config
        output.mkdir(parents=True, exist_ok=True)
        self._scratch = output / f"{_SCRATCH}{config.scope}"
        self._days: dict[str, _Day] = {}
        self._buffered = self._opened = 0
        self._locks = _lock(output, config.scope)
        self._clean()  # this process has the lock, so existing scratch files are from a dead writer

    def __enter__(self) -> Partitions:
        """Return the partitions themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """Discard what was not committed and release the folder."""
        for day in self._days.values():
            if day.writer is not None:
                day.writer.close()
        self._clean()
        for lock in self._locks:
            lock.close()

    @property
    def rows(self) -> dict[str, int]:
        """Rows appended so far, by day in order."""
        return {name: self._days[name].rows for name in sorted(self._days)}

    def append(self, day: str, table: pa.Table) -> None:
        """Append `table` after the rows `day` (YYYY-MM-DD) already has.

        Raises:
            ValueError: the output already has this day and overwrite is off.
        """
        if day not in self._days:
            self._refuse_existing(day)
            self._days[day] = _Day()
        state = self._days[day]
        state.waiting.append(table)
        state.waiting_rows += table.num_rows
        state.rows += table.num_rows
        self._buffered += table.num_rows
        if state.waiting_rows >= self.config.row_group_rows:
            self._write(day, partial=False)
        while self._buffered > self.config.buffered_rows:
            fullest = max(self._days, key=lambda name: self._days[name].waiting_rows)
            self._write(fullest, partial=True)

    def commit(
        self, manifest: dict[str, Any], statistics: dict[str, dict[str, Any]]
    ) -> dict[str, int]:
        """Rename the finished days into place, write their manifests last; return the rows by day.

        Args:
            manifest: entries of every day's manifest, in addition to its rows and files.
            statistics: content of `_statistics.json` by day.
        """
        for name in self._days:
            self._write(name, partial=True)
            self._finish_file(self._days[name])
        for name in self._days:
            folder = self._scratch / f"dt={name}"
            write_json(folder / STATISTICS, statistics.get(name, {}))
            target = self.output / f"dt={name}"
            if target.exists():
                target.rename(self._scratch / f"{_REPLACED}{name}")
            folder.rename(target)
        for name, day in self._days.items():
            mine = {"day": name, "rows": day.rows, "files": day.files}
            write_json(self.output / f"dt={name}" / MANIFEST, {**mine, **manifest})
        return self.rows

    def _clean(self) -> None:
        """Restore days whose replacement was not finished, then remove the scratch folder."""
        for old in self._scratch.glob(f"{_REPLACED}*"):
            target = self.output / f"dt={old.name.removeprefix(_REPLACED)}"
            if not (target / MANIFEST).exists():
                shutil.rmtree(target, ignore_errors=True)
                old.rename(target)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _refuse_existing(self, day: str) -> None:
        target = self.output / f"dt={day}"
        if self.config.overwrite or not target.exists():
            return
        complete = (target / MANIFEST).exists()
        state = "complete" if complete else "without a manifest, so from an interrupted run"
        raise ValueError(
            f"{target} already exists ({state}); pass --overwrite to replace the days of this "
            "input, or choose another output"
        )

    def _write(self, name: str, *, partial: bool) -> None:
        """Write the whole row groups that wait for day `name`; with `partial`, the rest too."""
        day, size = self._days[name], self.config.row_group_rows
        count = day.waiting_rows if partial else day.waiting_rows // size * size
        if not count:
            return
        table = pa.concat_tables(day.waiting)
        for first in range(0, count, size):
            part = table.slice(first, min(size, count - first))
            self._writer(name, part.schema).write_table(part, row_group_size=size)
            day.file_rows += part.num_rows
            if day.file_rows >= self.config.rows_per_file:
                self._finish_file(day)
        rest = table.slice(count)
        # A slice keeps its parent's buffers alive. Copying the rest frees them.
        day.waiting = [rest.take(pa.array(np.arange(rest.num_rows)))] if rest.num_rows else []
        day.waiting_rows = rest.num_rows
        self._buffered -= count

    def _writer(self, name: str, schema: pa.Schema) -> pq.ParquetWriter:
        day = self._days[name]
        if day.writer is None:
            held = [other for other in self._days.values() if other.writer is not None]
            if len(held) >= self.config.open_files:
                self._finish_file(min(held, key=lambda other: other.opened))
            folder = self._scratch / f"dt={name}"
            folder.mkdir(parents=True, exist_ok=True)
            day.files.append(f"part-{len(day.files):05d}.parquet")
            day.opened = self._opened = self._opened + 1
            day.writer = pq.ParquetWriter(
                folder / day.files[-1], schema, compression="zstd", write_page_checksum=True
            )
        return day.writer

    def _finish_file(self, day: _Day) -> None:
        if day.writer is not None:
            day.writer.close()
        day.writer, day.file_rows = None, 0


def read_manifests(output: str | Path) -> dict[str, dict[str, Any]]:
    """Return the manifests of the complete days under `output`, by day in order."""
    manifests = {}
    for path in sorted(Path(output).glob(f"dt=*/{MANIFEST}")):
        found = _DAY.fullmatch(path.parent.name)
        if found:
            manifests[found[1]] = read_manifest(path.parent)
    return manifests


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a complete day's folder, or nothing.

    Raises:
        ValueError: it is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        found = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON ({error}); ingest the day again") from error
    whole = isinstance(found, dict) and isinstance(found.get("rows"), int)
    if not whole or not isinstance(found.get("files"), list):
        raise ValueError(
            f"{path}: expected an object with a number 'rows' and a list 'files', got another; "
            "ingest the day again"
        )
    return found


def day_of_path(path: str | Path) -> str:
    """Return the day of a `dt=YYYY-MM-DD` folder in `path`, or an empty string."""
    days = [found[1] for part in Path(path).parts if (found := _DAY.fullmatch(part))]
    return days[-1] if days else ""


def _lock(output: Path, scope: str) -> list[TextIO]:
    """Lock the output: exclusively, or with a scope shared, plus an exclusive lock of the scope."""
    wanted = [(".lock", fcntl.LOCK_SH if scope else fcntl.LOCK_EX)]
    wanted += [(f".lock-{scope}", fcntl.LOCK_EX)] if scope else []
    held: list[TextIO] = []
    for name, kind in wanted:
        held.append((output / name).open("w"))
        try:
            fcntl.flock(held[-1], kind | fcntl.LOCK_NB)
        except OSError as error:
            for handle in held:
                handle.close()
            raise RuntimeError(
                f"another process is writing to {output}; wait for it to end, or choose another "
                "output"
            ) from error
    return held
