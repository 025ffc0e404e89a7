# SPDX-License-Identifier: MIT
"""Bad rows: one line each in a CSV file, and the policy that stops the run.

The columns are file, row (the first data row is 1), column, reason and value. The format is CSV
because people read it. The file is outside the partitions, so Parquet readers ignore it.
"""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipelines.ingestion.parsing import Mask
from pipelines.ingestion.source import RawRows
from trainer.data.discovery import printable

_HEADER = ("file", "row", "column", "reason", "value")
_VALUE_LENGTH = 100
_EARLY_ROWS = 100_000
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Quarantine:
    """Collects the bad rows of one run in `folder`.

    Args:
        folder: folder of the CSV file.
        policy: `fail` raises at the first bad row; `quarantine` continues.
        max_share: largest share of bad rows, checked at the end, and early after 100,000 bad rows.
        scope: suffix of the file's name.
    """

    def __init__(self, folder: Path, policy: str, max_share: float, scope: str = "") -> None:
        self.policy, self.max_share = policy, max_share
        self.rows = 0
        self.reasons: Counter[tuple[str, str]] = Counter()
        self._folder, self._open = folder, folder / f".open{scope}.csv"
        self._failed = f"failed{scope}"
        self._open.unlink(missing_ok=True)

    def add(self, path: str, rows: RawRows, problems: list[tuple[str, Mask, str]]) -> Mask:
        """Record the malformed rows and the (column, mask, reason) problems; return the bad rows.

        Raises:
            ValueError: the policy is `fail` and a row is bad.
        """
        path = printable(path)
        lines = [(path, row, "", why, _short(text)) for row, why, text in rows.malformed]
        bad = np.zeros(len(rows.numbers), np.bool_)
        for column, mask, why in problems:
            bad |= mask
            places = np.flatnonzero(mask)
            values = [""] * len(places)
            if column in rows.records.schema.names:
                taken = rows.records.column(column).take(pa.array(places))
                values = [_text(value) for value in taken]
            numbers = rows.numbers[places].tolist()
            lines += [
                (path, row, column, why, value) for row, value in zip(numbers, values, strict=True)
            ]
        if lines:
            lines.sort(key=lambda line: line[1])
            self._write(lines)
        self.rows += len(rows.malformed) + int(np.count_nonzero(bad))
        return bad

    def check(self, num_rows: int, *, last: bool) -> None:
        """Stop the run if too many of `num_rows` rows are bad.

        Raises:
            ValueError: the share of bad rows is above the limit, or no row is good.
        """
        if not self.rows or (not last and self.rows < _EARLY_ROWS):
            return
        share = self.rows / num_rows
        if share > self.max_share or (last and self.rows == num_rows):
            kept = self.close(self._failed)
            raise ValueError(
                f"{self.rows:,} of {num_rows:,} rows are bad ({share:.2%}), more than "
                f"--max-bad-share {self.max_share:.2%} or all; {self.summary()}; they are listed "
                f"in {kept}"
            )

    def summary(self, count: int = 3) -> str:
        """Return the most frequent reasons in words."""
        most = self.reasons.most_common(count)
        return ", ".join(f"{column or 'row'}: {why} ({times:,})" for (column, why), times in most)

    def close(self, name: str) -> Path | None:
        """Give the file its final name; return its path, or None if no row was bad."""
        if not self._open.exists():
            return None
        final = self._folder / f"{name}.csv"
        os.replace(self._open, final)
        return final

    def _write(self, lines: list[tuple[str, int, str, str, str]]) -> None:
        if self.policy == "fail":
            path, row, column, why, value = lines[0]
            where = f"column {column!r}: {why}, got {value!r}" if column else f"{why}: {value!r}"
            raise ValueError(
                f"{path}, row {row}, {where}; mend the log, or set rows like this aside with "
                "--on-bad-row quarantine"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        is_new = not self._open.exists()
        with self._open.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(_HEADER)
            writer.writerows([_cell(cell) for cell in line] for line in lines)
        self.reasons.update((column, why) for _, _, column, why, _ in lines)


def _text(value: pa.Scalar) -> str:
    if not value.is_valid:
        return ""
    return _short(str(value.as_py()))


def _cell(value: str | int) -> str | int:
    """Prefix text that a spreadsheet could run as a formula with an apostrophe; keep numbers."""
    if isinstance(value, str) and value.startswith(_FORMULA) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


def _short(text: str) -> str:
    return text if len(text) <= _VALUE_LENGTH else text[: _VALUE_LENGTH - 3] + "..."
