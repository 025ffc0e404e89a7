# SPDX-License-Identifier: MIT
"""The ingestion of a raw log: read files, check columns, quarantine bad rows, split rows by day.

Files, formats, columns, types and days are checked before the first row is read. Rows are then
converted one batch at a time, so memory does not grow with the log. Every step is vectorised. Only
the few distinct texts of low-cardinality columns become Python objects.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from embeddings.schema.schema import Schema
from pipelines.ingestion.casting import Times, convert
from pipelines.ingestion.column_stats import Statistics, Texts, largest_drifts
from pipelines.ingestion.formats import open_source
from pipelines.ingestion.id_kinds import check_columns, decide_kinds, recorded_kinds
from pipelines.ingestion.parsing import Mask, pc, to_text
from pipelines.ingestion.partition import PartitionConfig, Partitions
from pipelines.ingestion.quarantine import Quarantine
from pipelines.ingestion.rules import Rule, rules
from pipelines.ingestion.source import RawRows, Source, SourceConfig, first_line
from pipelines.ingestion.sources import list_sources
from pipelines.ingestion.text_lists import split_text
from trainer.data.columns import is_list
from trainer.data.discovery import day_of, printable
from trainer.data.hashing import is_text

_DAY_MS = 86_400_000
_MANY_DAYS = 400
_KINDS = ("string", "int", "float")
_NOT_NUMBERS = ("id", "integer", "time")


@dataclass(frozen=True, kw_only=True)
class IngestConfig:
    """Settings for reading and writing a log.

    Args:
        source: file format.
        partition: layout of the days.
        times: unit and pattern of times.
        list_separator: separator of the entries of a list in a text column.
        keep: columns that are copied unchanged, in addition to those of the schema.
        kinds: column -> `string`, `int` or `float`; overrides the guess from the log.
        day: the day (YYYY-MM-DD) of a log whose schema has no timestamp.
        by_folder: a row's day is that of the dt= folder it lies in, whatever its timestamp says.
        on_bad_row: `quarantine`, or `fail` at the first.
        max_bad_share: largest share of bad rows; above it nothing is written.
        null_labels: `quarantine` rows without a label, or `mask`: keep rows with at least one.
    """

    source: SourceConfig = field(default_factory=SourceConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    times: Times = field(default_factory=Times)
    list_separator: str = ""
    keep: tuple[str, ...] = ()
    kinds: dict[str, str] = field(default_factory=dict)
    day: str = ""
    by_folder: bool = False
    on_bad_row: str = "quarantine"
    max_bad_share: float = 0.01
    null_labels: str = "quarantine"

    def __post_init__(self) -> None:
        """Check the settings by themselves; `Ingestion` checks them against the schema."""
        for name, value, known in (
            ("on_bad_row", self.on_bad_row, ("quarantine", "fail")),
            ("null_labels", self.null_labels, ("quarantine", "mask")),
            *((f"type of {column!r}", kind, _KINDS) for column, kind in self.kinds.items()),
        ):
            if value not in known:
                raise ValueError(f"{name}: expected one of {list(known)}, got {value!r}")
        if not 0 <= self.max_bad_share <= 1:
            raise ValueError(f"max_bad_share: expected a share in [0, 1], got {self.max_bad_share}")
        if self.day:
            try:
                date.fromisoformat(self.day)
            except ValueError:
                raise ValueError(f"day: expected YYYY-MM-DD, got {self.day!r}") from None

    def build(self, schema: Schema) -> Ingestion:
        """Return the ingestion of logs of `schema`. See `Ingestion` for what is raised."""
        return Ingestion(schema, self)


@dataclass(frozen=True, kw_only=True)
class IngestSummary:
    """What an ingestion did.

    Args:
        files: raw files that were read.
        rows_in: rows of the raw files, both written and quarantined.
        rows_bad: rows in the quarantine.
        days: rows written, by day.
        kinds: `string`, `int` or `float` by id column.
        reasons: the most frequent reasons of bad rows.
        drifts: columns with the largest changes of statistics.
        quarantine: the file of bad rows, if there is one.
        seconds: time taken.
        notes: remarks for the user on how files were found and read.
    """

    files: int
    rows_in: int
    rows_bad: int
    days: dict[str, int]
    kinds: dict[str, str]
    reasons: str
    drifts: list[str]
    quarantine: Path | None
    seconds: float
    notes: list[str] = field(default_factory=list)


def _many_days(days: list[str]) -> str:
    """Return a note if a log has unusually many days: the timestamp unit may be wrong."""
    if len(days) <= _MANY_DAYS:
        return ""
    return f"{len(days)} days from {days[0]} to {days[-1]}; is --timestamp-unit right?"


class Ingestion:
    """Raw logs of one schema -> days of typed Parquet.

    Raises:
        ValueError: a setting contradicts the schema or would have no effect.
    """

    def __init__(self, schema: Schema, config: IngestConfig) -> None:
        self.schema, self.config = schema, config
        self.rules = rules(schema, null_labels=config.null_labels == "mask")
        open_kinds = [column for column, rule in self.rules.items() if rule.has_kind]
        for column in config.kinds:
            if column not in open_kinds:
                raise ValueError(
                    f"type of {column!r}: has no effect, the schema leaves the type open for "
                    f"{open_kinds} only"
                )
        if config.day and schema.timestamp:
            raise ValueError(
                f"day: has no effect, the schema's timestamp {schema.timestamp!r} gives the days"
            )
        already = sorted(set(config.keep) & set(self.rules))
        if already:
            raise ValueError(f"keep: has no effect on {already}, the schema has these columns")

    def run(
        self, sources: list[str], output: str | Path, note: dict[str, Any] | None = None
    ) -> IngestSummary:
        """Read every file of `sources` (files, folders, globs) and write its days under `output`.

        Args:
            note: additional JSON data for the manifests of the days.

        Raises:
            ValueError: a file is missing, empty, of another format or without a column; a bad row
                under policy `fail`, or too many of them; a day that exists already.
            RuntimeError: another process is writing to `output`.
        """
        started, output, config = time.monotonic(), Path(output), self.config
        paths = list_sources(sources, config.source.format)
        opened = [open_source(path, config.source) for path in paths]
        for source in opened:
            self._check_source(source)
        numbers = {name for name, rule in self.rules.items() if rule.role not in _NOT_NUMBERS}
        statistics, rows_in, self.texts = Statistics(numbers), 0, Texts()
        with config.partition.build(output) as partitions:
            # Only the owner of the folder may read its kinds, or remove a quarantine left open.
            self.kinds = decide_kinds(
                opened, self.rules, config.kinds, recorded_kinds(output), config.list_separator
            )
            scope = config.partition.scope
            limits = (config.on_bad_row, config.max_bad_share, f"-{scope}" if scope else "")
            bad = Quarantine(output / "_quarantine", *limits)
            for source in opened:
                for rows in source.rows([*self.rules, *config.keep]):
                    rows_in += len(rows.numbers) + len(rows.malformed)
                    self._append(source, rows, (bad, statistics, partitions))
                    bad.check(rows_in, last=False)
            bad.check(rows_in, last=True)
            days = list(partitions.rows)
            if not days:
                raise ValueError(f"expected rows, got none in {len(paths)} files: {sources}")
            kept = bad.close(f"{days[0]}_{days[-1]}")
            counts = {"sources": sources, "rows_in": rows_in, "rows_quarantined": bad.rows}
            manifest = {**self._written_by(), **counts, **(note or {})}
            found = statistics.days(output)
            notes = [
                paths.note(),
                _many_days(days),
                *(note for source in opened for note in source.notes),
            ]
            written = partitions.commit(manifest, found)
        return IngestSummary(
            files=len(paths),
            rows_in=rows_in,
            rows_bad=bad.rows,
            days=written,
            kinds=self.kinds,
            reasons=bad.summary(),
            drifts=largest_drifts(found),
            quarantine=kept,
            seconds=time.monotonic() - started,
            notes=[note for note in dict.fromkeys(notes) if note],
        )

    def _written_by(self) -> dict[str, Any]:
        """Return the manifest's entries on the schema and the kinds of ids."""
        return {
            "schema": self.schema.fingerprint(),
            "kinds": self.kinds,
            "texts": self.texts.columns(),
        }

    def _check_source(self, source: Source) -> None:
        check_columns(source, [*self.rules, *self.config.keep])
        types = {name: source.schema.field(name).type for name in self.rules}
        lists = [name for name, rule in self.rules.items() if rule.is_list and is_text(types[name])]
        if source.is_text and lists:
            self._check_separator(source, lists)
        for name, rule in self.rules.items():
            if is_list(types[name]) and not rule.is_list and source.is_text:
                raise ValueError(
                    f"{printable(source.path)}: column {name!r}: expected a single value a row, "
                    "got lists; make its feature one of lists, or write another column"
                )
        by_folder = self.config.by_folder or not self.schema.timestamp
        if by_folder and not self.config.day and not day_of(source.path):
            raise ValueError(
                f"{printable(source.path)}: its day is unknown: the schema has no timestamp and "
                "the path no dt=YYYY-MM-DD folder; say --day"
            )

    def _check_separator(self, source: Source, lists: list[str]) -> None:
        if not self.config.list_separator:
            raise ValueError(
                f"{printable(source.path)}: columns {lists} are lists; say --list-separator"
            )

    def _append(
        self, source: Source, rows: RawRows, into: tuple[Quarantine, Statistics, Partitions]
    ) -> None:
        """Convert a batch, quarantine its bad rows and append the others to their days."""
        quarantine, statistics, partitions = into
        columns: dict[str, pa.Array] = {}
        problems: list[tuple[str, Mask, str]] = []
        for name, rule in self.rules.items():
            column = rows.records.column(name)
            if rule.is_list and is_text(column.type):
                self._check_separator(source, [name])
                column, broken = split_text(column, self.config.list_separator)
                problems.append((name, broken, "a list that cannot be read"))
            try:
                converted = convert(rule, self.kinds.get(name, ""), column, self.config.times)
                columns[name] = converted.values.cast(rule.output_type(self.kinds.get(name, "")))
                self._name(name, rule, column)
            except pa.ArrowException as error:
                raise ValueError(
                    f"{printable(source.path)}: column {name!r} of type {column.type} cannot be "
                    f"converted ({first_line(error)}); write it as another type"
                ) from error
            problems += [(name, mask, why) for mask, why in converted.problems]
        problems += rows.doubts
        problems = [problem for problem in problems if problem[1].any()]
        problems += self._uneven_lists(columns) + self._without_labels(columns)
        bad = quarantine.add(source.path, rows, problems)
        for name in self.config.keep:
            columns[name] = rows.records.column(name)
        table = pa.table(columns)
        if bad.any():
            table = table.filter(pa.array(~bad))
        for day, part in self._by_day(table, source.path):
            statistics.add(day, part)
            partitions.append(day, part)

    def _name(self, name: str, rule: Rule, column: pa.Array) -> None:
        """Record the texts and hashes of a column of single ids while it has few texts."""
        kind = self.kinds.get(name, "")
        if kind != "string" or rule.role != "id" or rule.is_list or not self.texts.is_open(name):
            return
        # One text above the limit closes the column.
        texts, _ = to_text(pc.unique(column).slice(0, self.texts.limit + 2))
        texts = texts.drop_null().slice(0, self.texts.limit + 1)
        self.texts.add(name, texts, convert(rule, kind, texts, self.config.times).values)

    def _uneven_lists(self, columns: dict[str, pa.Array]) -> list[tuple[str, Mask, str]]:
        """Find rows whose lists of a history, or of ids and their weights, differ in length."""
        aligned: dict[tuple[str, str], str] = {}
        for history, features in self.schema.histories.items():
            names = [feature.column for feature in features]
            names += [self.schema.history_actions.get(history, names[0])]
            why = f"history {history!r}: another length than column {names[0]!r}"
            aligned |= {(names[0], name): why for name in names[1:]}
        for feature in self.schema.sparse:
            if feature.weights:
                why = f"weights of {feature.name!r}: another length than column {feature.column!r}"
                aligned.setdefault((feature.column, feature.weights), why)
        problems = []
        for (first, name), why in aligned.items():
            lengths = [pc.list_value_length(columns[one]).to_numpy() for one in (first, name)]
            uneven = lengths[0] != lengths[1]
            if uneven.any():
                problems.append((name, uneven, why))
        return problems

    def _without_labels(self, columns: dict[str, pa.Array]) -> list[tuple[str, Mask, str]]:
        if self.config.null_labels != "mask":
            return []
        names = [label.column for label in self.schema.labels]
        missing = np.all(
            [columns[name].is_null().to_numpy(zero_copy_only=False) for name in names], 0
        )
        return [(names[0], missing, "every label is missing")] if missing.any() else []

    def _by_day(self, table: pa.Table, path: str) -> list[tuple[str, pa.Table]]:
        """Split rows by day, each day's rows in their order."""
        if not table.num_rows:
            return []
        if self.config.by_folder or not self.schema.timestamp:
            return [(self.config.day or day_of(path), table)]
        days = table.column(self.schema.timestamp).to_numpy() // _DAY_MS
        parts = []
        for number in np.unique(days):
            rows = days == number
            part = table if rows.all() else table.filter(pa.array(rows))
            parts.append((str(np.datetime64(int(number), "D")), part))
        return parts
