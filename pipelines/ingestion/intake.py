# SPDX-License-Identifier: MIT
"""Ingest raw days once, and again if their bytes have changed.

A day's manifest records its sources: names, sizes and hashes of the raw files, the schema and the
settings. An identical delivery is skipped. A day with changed or added files is ingested again and
replaces the old one. Types are decided for all days before any is written.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from embeddings.schema.schema import Schema
from pipelines.ingestion.formats import open_source
from pipelines.ingestion.id_kinds import check_columns, decide_kinds, recorded_kinds
from pipelines.ingestion.ingestion import IngestConfig
from pipelines.ingestion.partition import read_manifest
from pipelines.ingestion.readiness import files_of
from pipelines.ingestion.sources import list_sources
from pipelines.orchestration.fingerprints import of_values
from trainer.checkpoint.storage import Folder, locate

_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Result of one raw day.

    Args:
        day: YYYY-MM-DD.
        state: `new`, `same` (nothing was done) or `changed`.
        rows: rows of the typed day.
        raw_files: number of raw files.
        files: number of typed files.
        note: differences from the earlier delivery.
    """

    day: str
    state: str
    rows: int
    raw_files: int
    files: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Intake:
    """Ingestion of raw days.

    Args:
        raw: folder of raw days, or its URL.
        output: folder of typed days.
        schema: schema of the log.
        config: settings of the ingestion.
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
        """Return metadata that shows, without reading the content, whether a raw file changed."""
        folder = locate(self.raw) / f"dt={day}"
        return {path.name: _stamp(path) for path in (files_of(folder) if folder.is_dir() else [])}

    def take(self, days: Sequence[str], say: Callable[[str], None]) -> list[Delivery]:
        """Ingest the new and changed days of `days`; return the result of each.

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
        """Decide the kinds for all days at once, with the same result in every process."""
        ingestion = self.config.build(self.schema)
        names = [f"{self.raw.rstrip('/')}/dt={day}" for day in days]
        if not names:
            return self.config.kinds
        paths = list_sources(names, self.config.source.format)
        opened = [open_source(path, self.config.source) for path in paths]
        for source in opened:
            check_columns(source, [*ingestion.rules, *self.config.keep])
        recorded = recorded_kinds(self.output)
        separator = self.config.list_separator
        kinds = decide_kinds(opened, ingestion.rules, self.config.kinds, recorded, separator)
        return {name: kind for name, kind in kinds.items() if ingestion.rules[name].has_kind}


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
    """Return the differences from the earlier delivery as text."""
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
