# SPDX-License-Identifier: MIT
"""Raw days as they come, come late and come again: python -m pipelines.deliveries RAW --output DIR.

Each ready day RAW/dt=YYYY-MM-DD becomes the day DIR/dt=YYYY-MM-DD of typed Parquet, many small
files a few large ones. What a day was made from stands in its manifest (names, sizes and hashes of
the raw files, the schema, the settings), so that the same delivery twice does nothing, and a day
whose bytes have changed, or to which files were added, is made again and put in place of the old
one. Types are decided over all the days before any is written.

  python -m pipelines.deliveries RAW --schema schema.yaml --output DIR --ready success
  torchrun --nproc-per-node 4 -m pipelines.deliveries RAW --schema schema.yaml --output DIR
  torchx run -s local_cwd dist.ddp -j 1x4 -m pipelines.deliveries -- RAW --schema ...

Processes that a launcher has started share the days among them. RAW may be a URL that fsspec knows.
The options on values and bad rows are those of `pipelines.ingest`. Exit codes: 0 done; 1 it failed;
2 options or data are wrong; 4 no day is ready.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from embeddings.schema.schema import Schema, load_schema
from pipelines.ingest import add_file_options, add_row_options, config_of
from pipelines.ingestion.id_kinds import check_columns, decide_kinds, recorded_kinds
from pipelines.ingestion.ingestion import IngestConfig
from pipelines.ingestion.partition import read_manifest
from pipelines.ingestion.readiness import MARKS, Readiness, files_of
from pipelines.ingestion.sources import list_sources
from pipelines.orchestration.fingerprints import of_values
from pipelines.orchestration.help_screens import add_help
from pipelines.orchestration.text_tables import table
from trainer.checkpoint.storage import Folder, locate
from trainer.data.splits import parse_days

NOT_READY = 4
_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What became of one raw day. state: `new`, `same` (nothing was done) or `changed`."""

    day: str
    state: str
    rows: int
    raw_files: int
    files: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Intake:
    """Takes raw days in.

    raw: the folder of raw days, or its URL. output: the folder of typed days.
    """

    raw: str
    output: Path
    schema: Schema
    config: IngestConfig

    def contents(self, day: str) -> dict[str, list[Any]]:
        """Return the bytes and the SHA-256 of each raw file of a day by name."""
        folder = locate(self.raw) / f"dt={day}"
        start = len(str(folder)) + 1
        return {str(path)[start:]: _digest(path) for path in files_of(folder)}

    def stamps(self, day: str) -> dict[str, Any]:
        """Return what tells, without reading it, whether a raw file is another than before."""
        folder = locate(self.raw) / f"dt={day}"
        return {path.name: _stamp(path) for path in (files_of(folder) if folder.is_dir() else [])}

    def take(self, days: Sequence[str], say: Callable[[str], None]) -> list[Delivery]:
        """Ingest what is new or has changed of `days`; return what became of each.

        Raises:
            ValueError: as `Ingestion.run`; nothing of a day with an error is written.
            RuntimeError: another process is writing one of the days.
        """
        wanted = {day: self._made_from(day) for day in days}
        known = {day: read_manifest(self.output / f"dt={day}") for day in days}
        fresh = [day for day in days if known[day].get("made_from") != wanted[day]]
        config = dataclasses.replace(self.config, by_folder=True, kinds=self._kinds(fresh))
        found = []
        for day in days:
            raw_files = len(wanted[day]["files"])
            if day not in fresh:
                rows, files = known[day]["rows"], len(known[day]["files"])
                state = note = "same"
            else:
                state = "changed" if known[day] else "new"
                note = _changes(known[day].get("made_from", {}), wanted[day])
                rows, files = self._ingest(day, wanted[day], config)
                about = f"; {note}" if note else ""
                say(f"{day}: {state}, {rows:,} rows, {raw_files} files to {files}{about}")
            delivery = {"state": state, "rows": rows, "raw_files": raw_files, "files": files}
            found.append(Delivery(day=day, note="" if note == "same" else note, **delivery))
        return found

    def _ingest(self, day: str, made_from: dict[str, Any], config: IngestConfig) -> tuple[int, int]:
        part = dataclasses.replace(config.partition, overwrite=True, scope=day)
        ingestion = dataclasses.replace(config, partition=part).build(self.schema)
        source = f"{self.raw.rstrip('/')}/dt={day}"
        ingestion.run([source], self.output, {"made_from": made_from})
        manifest = read_manifest(self.output / f"dt={day}")
        return manifest["rows"], len(manifest["files"])

    def _made_from(self, day: str) -> dict[str, Any]:
        settings = dataclasses.asdict(self.config)
        return {
            "files": self.contents(day),
            "schema": self.schema.fingerprint(),
            "settings": of_values(settings),
        }

    def _kinds(self, days: Sequence[str]) -> dict[str, str]:
        """Decide the kinds over all days at once; every process comes to the same."""
        ingestion = self.config.build(self.schema)
        names = [f"{self.raw.rstrip('/')}/dt={day}" for day in days]
        if not names:
            return self.config.kinds
        paths = list_sources(names, self.config.source.format)
        opened = [self.config.source.build(path) for path in paths]
        for source in opened:
            check_columns(source, [*ingestion.rules, *self.config.keep])
        recorded = recorded_kinds(self.output)
        separator = self.config.list_separator
        kinds = decide_kinds(opened, ingestion.rules, self.config.kinds, recorded, separator)
        return {name: kind for name, kind in kinds.items() if ingestion.rules[name].has_kind}


def describe(found: Sequence[Delivery]) -> str:
    """Return a line a day."""
    rows = [
        (one.day, one.state, f"{one.rows:,}", f"{one.raw_files} to {one.files}", one.note)
        for one in found
    ]
    return table(("day", "delivery", "rows", "files", ""), rows)


def _digest(path: Folder) -> list[Any]:
    size, digest = 0, hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            size += len(part)
            digest.update(part)
    return [size, digest.hexdigest()]


def _stamp(path: Folder) -> list[Any]:
    if isinstance(path, Path):
        found = path.stat()
        return [found.st_size, found.st_mtime_ns]
    return [fsspec.filesystem(path.protocol).ukey(path.url)]


def _changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Say what is different from the delivery before."""
    if not before:
        return ""
    old, new = before["files"], now["files"]
    counts = {
        "added": len(new.keys() - old.keys()),
        "gone": len(old.keys() - new.keys()),
        "changed": sum(old[name] != new[name] for name in old.keys() & new.keys()),
    }
    parts = [f"{count} files {word}" for word, count in counts.items() if count]
    parts += [f"another {name}" for name in ("schema", "settings") if before[name] != now[name]]
    return ", ".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        readiness = Readiness(mark=options.ready, min_rows=options.ready_rows)
        first, last = parse_days(options.days, "--days") or ("", "9")
        days = [day for day in readiness.days(options.raw) if first <= day <= last]
        if not days:
            print(f"error: {options.raw}: no day is ready; {readiness.describe()}", file=sys.stderr)
            return NOT_READY
        intake = Intake(
            raw=options.raw,
            output=Path(options.output),
            schema=load_schema(options.schema),
            config=config_of(options),
        )
        number, count = _part(options.part)
        print(describe(intake.take(days[number::count], print)))
    except (ValueError, RuntimeError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


def _part(text: str) -> tuple[int, int]:
    """Return this process's number and their count: as asked for, or as a launcher says."""
    if not text:
        from trainer.runtime.runtime import place

        return place()
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ValueError(f"--part: expected NUMBER/COUNT such as 0/4, got {text!r}")
    return int(number), int(count)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.deliveries",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m pipelines.deliveries RAW --schema FILE --output DIR [OPTION ...]",
        add_help=False,
    )
    add_help(parser, ("files", "values", "bad rows"))
    add = parser.add_argument
    add("raw", metavar="RAW", help="folder or URL of the raw days dt=YYYY-MM-DD")
    add("--schema", metavar="FILE", required=True, help="the schema's YAML file")
    add("--output", metavar="DIR", required=True, help="folder of the typed days")
    add("--days", default="", metavar="FIRST:LAST", help="(default: all that are ready)")
    add("--ready", default="success", choices=MARKS, help="what makes a day ready: see README")
    add("--ready-rows", type=int, default=0, metavar="N", help="of --ready rows")
    add("--part", default="", metavar="I/N", help="days I, I + N, ... (default: the launcher's)")
    add_file_options(parser)
    add_row_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
