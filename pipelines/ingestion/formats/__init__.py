# SPDX-License-Identifier: MIT
"""The formats of raw logs: one file each, and its line in `FORMATS`.

A format opens a path as a `Source` (`pipelines/ingestion/source.py`): the columns are known at
once, the rows come in batches that know their numbers. `streams.py` decompresses and decodes,
`records.py` cuts text into rows. May import `trainer.data`, `trainer.checkpoint.storage`,
`pipelines.ingestion.source`, pyarrow and NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pipelines.ingestion.formats.columnar import Parquet
from pipelines.ingestion.formats.delimited import Delimited
from pipelines.ingestion.formats.json_lines import JsonLines
from pipelines.ingestion.formats.streams import COMPRESSIONS, compression_of
from pipelines.ingestion.source import Source, SourceConfig
from trainer.data.discovery import PARQUET


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of raw files.

    Args:
        name: as --format takes it.
        endings: of the names of its files, in lower case.
        open: returns a file as a `Source`.
        is_compressed: whether an ending such as .gz may follow.
    """

    name: str
    endings: tuple[str, ...]
    open: Callable[[str, SourceConfig], Source]
    is_compressed: bool = True


FORMATS = (
    Format(name="csv", endings=(".csv", ".txt"), open=partial(Delimited, delimiter=",")),
    Format(name="tsv", endings=(".tsv", ".tab"), open=partial(Delimited, delimiter="\t")),
    Format(name="jsonl", endings=(".jsonl", ".ndjson", ".json"), open=JsonLines),
    Format(name="parquet", endings=PARQUET, open=Parquet, is_compressed=False),
)
NAMES = tuple(one.name for one in FORMATS)


def format_of(path: str) -> Format | None:
    """Return the format that a file's name tells, in upper or lower case, or None."""
    name = path.lower()
    compression = compression_of(name)
    for one in FORMATS:
        if compression and not one.is_compressed:
            continue
        if name.removesuffix(compression).endswith(one.endings):
            return one
    return None


def open_source(path: str, config: SourceConfig) -> Source:
    """Open one raw file by `config.format`, or by its name.

    Raises:
        ValueError: the name tells no format, or the file is not what it should be.
    """
    chosen = next((one for one in FORMATS if one.name == config.format), None)
    chosen = chosen or format_of(path)
    if chosen is None:
        endings = ", ".join(ending for one in FORMATS for ending in one.endings)
        raise ValueError(
            f"{path}: its name tells no format ({endings}; text also compressed: "
            f"{', '.join(COMPRESSIONS)}); say --format, or unpack it"
        )
    return chosen.open(path, config)
