# SPDX-License-Identifier: MIT
"""Bytes of files, decompressed, and their text as UTF-8, a block at a time."""

from __future__ import annotations

import codecs
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines.ingestion.source import SourceConfig, first_line
from trainer.checkpoint.storage import locate
from trainer.data.discovery import openable, printable

COMPRESSIONS = {
    ".gz": "gzip",
    ".bz2": "bz2",
    ".zst": "zstd",
    ".lz4": "lz4",
    ".br": "brotli",
    ".xz": "xz",
}
_XZ_BYTES = 1 << 20
# How files begin that are no text.
_MAGIC = {
    b"PAR1": "a Parquet file; use --format parquet",
    b"\x1f\x8b": "gzip; its name must end with .gz",
    b"BZh": "bzip2; its name must end with .bz2",
    b"\x28\xb5\x2f\xfd": "Zstandard; its name must end with .zst",
    b"\x04\x22\x4d\x18": "LZ4; its name must end with .lz4",
    b"\xfd7zXZ": "xz; its name must end with .xz",
    b"PK\x03\x04": "a ZIP archive; unpack it",
    b"ORC": "an ORC file; convert it to Parquet",
    b"Obj\x01": "an Avro file; convert it to Parquet",
}
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def compression_of(path: str) -> str:
    """Return the ending of a name that says how the file is compressed, or an empty string."""
    ending = Path(path).suffix.lower()
    return ending if ending in COMPRESSIONS else ""


def open_raw(path: str) -> Any:
    """Return what pyarrow reads a file by: a path on a disk, or an open file behind a URL."""
    place = locate(path)
    return openable(path) if isinstance(place, Path) else place.open("rb")


def check_text(path: str) -> None:
    """Check that a file that is named as text is none of the usual other things.

    Raises:
        ValueError: it is empty or begins as another format does.
    """
    with locate(path).open("rb") as file:
        first = file.read(8)
    if not first:
        raise ValueError(f"{printable(path)}: expected rows, got an empty file (0 bytes)")
    for magic, what in _MAGIC.items():
        if first.startswith(magic) and not compression_of(path):
            raise ValueError(f"{printable(path)}: expected text, got {what}")


def read_blocks(path: str, size: int) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed by its name's ending.

    Raises:
        ValueError: the file cannot be read to its end.
    """
    compression = COMPRESSIONS.get(compression_of(path))
    try:
        raw = open_raw(path)
        if compression == "xz":
            with pa.input_stream(raw, compression=None) as stream:
                yield from _read_xz(stream, size)
            return
        with pa.input_stream(raw, compression=compression) as stream:
            while block := stream.read(size):
                yield block
    except (pa.ArrowException, OSError, EOFError, lzma.LZMAError) as error:
        what = f" as {compression}" if compression else ""
        raise ValueError(
            f"{printable(path)}: cannot be read{what}: {first_line(error)}; it is damaged or cut "
            "off: copy it again"
        ) from error


def _read_xz(stream: Any, size: int) -> Iterator[bytes]:
    """Yield what the xz streams in a file hold, `size` bytes at most at a time.

    `lzma.open` leaves out, without a word, what follows a stream and is not another one.
    """
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ)
    while content := stream.read(_XZ_BYTES):
        while content:
            if decoder.eof:
                content = content.lstrip(b"\0")  # what may lie between streams
                decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ) if content else decoder
                continue
            block = decoder.decompress(content, size)
            while block:
                yield block
                more = not (decoder.needs_input or decoder.eof)
                block = decoder.decompress(b"", size) if more else b""
            content = decoder.unused_data
    if not decoder.eof:
        raise EOFError("the file ends before its xz stream does")


def read_text(path: str, config: SourceConfig) -> Iterator[bytes]:
    """Yield the text of a file as UTF-8, without a byte order mark.

    UTF-16 and UTF-32 are known by their byte order mark, whatever `config.encoding` says.

    Raises:
        ValueError: the file cannot be read, or looks like UTF-16 without its mark.
    """
    decoder: codecs.IncrementalDecoder | None = None
    is_utf8 = False
    for block in read_blocks(path, config.block_bytes):
        if decoder is None:
            encoding = config.encoding
            if codecs.lookup(encoding).name == "utf-8":
                encoding = next((name for mark, name in _MARKS if block.startswith(mark)), encoding)
                block = block.removeprefix(codecs.BOM_UTF8)
                if encoding == config.encoding and block[:4096].count(0) > len(block[:4096]) // 4:
                    raise ValueError(
                        f"{printable(path)}: expected text in {encoding}, got NUL bytes as UTF-16 "
                        "has them; say --encoding utf-16-le (or utf-16-be)"
                    )
            decoder = codecs.getincrementaldecoder(encoding)("backslashreplace")
            is_utf8 = codecs.lookup(encoding).name == "utf-8"
        if is_utf8 and block.isascii() and not decoder.getstate()[0]:
            yield block  # nothing to decode
            continue
        yield decoder.decode(block).encode("utf-8", "backslashreplace")
    if decoder is not None:
        yield decoder.decode(b"", final=True).encode("utf-8", "backslashreplace")


def with_last(blocks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield each block and whether it is the last; one empty block if there is none."""
    held = next(blocks, b"")
    for block in blocks:
        yield held, False
        held = block
    yield held, True
