# SPDX-License-Identifier: MIT
"""Bodies of requests and answers: columns as JSON or as an Arrow IPC stream, within bounds.

Compressed Arrow streams are refused: a few kilobytes may claim gigabytes.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import pyarrow as pa

from trainer.runtime.atomic_files import parse_json
from trainer.serving.batching import Answer

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"
# Fields of Arrow's flatbuffers by number: of Message, RecordBatch and DictionaryBatch.
_KIND, _HEADER, _COMPRESSION, _DATA = 1, 2, 3, 1
_DICTIONARY, _RECORDS = 2, 3


def read_columns(body: bytes, kind: str) -> Any:
    """Return the columns of a request, as `Scorer` takes them.

    Raises:
        ValueError: it is no such body.
    """
    if kind == ARROW:
        return _read_arrow(body)
    if kind != JSON:
        raise ValueError(f"content-type: expected {JSON} or {ARROW}, got {kind!r:.80}")
    try:
        found = parse_json(body)
    except ValueError as error:
        raise ValueError(f"body: expected JSON, got {error!s:.80}") from error
    columns = found.get("columns") if isinstance(found, dict) else None
    if not isinstance(columns, dict) or not all(isinstance(one, list) for one in columns.values()):
        raise ValueError('body: expected {"columns": {NAME: [VALUE, ...], ...}}')
    return columns


def write_answer(answer: Answer, kind: str) -> bytes:
    """Return scores in the format of the request."""
    if kind == ARROW:
        table = pa.table({name: pa.array(one) for name, one in answer.scores.items()})
        table = table.replace_schema_metadata({"model": answer.version})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return sink.getvalue().to_pybytes()
    scores = {name: one.tolist() for name, one in answer.scores.items()}
    return json.dumps({"model": answer.version, "probabilities": scores}).encode()


def _read_arrow(body: bytes) -> pa.Table:
    try:
        for message in pa.ipc.MessageReader.open_stream(body):
            if _is_compressed(message.metadata.to_pybytes()):
                raise ValueError("it is compressed; send it plain")
        table = pa.ipc.open_stream(body).read_all()
        table.validate(full=True)
        return table
    except (pa.ArrowException, OSError, ValueError, struct.error, IndexError) as error:
        raise ValueError(f"body: expected an Arrow IPC stream, got {error!s:.160}") from error


def _is_compressed(message: bytes) -> bool:
    """Return whether a message's flatbuffer says that its buffers are compressed."""
    (root,) = struct.unpack_from("<I", message, 0)
    kind, header = _field(message, root, _KIND), _field(message, root, _HEADER)
    if not kind or not header or message[kind] not in (_DICTIONARY, _RECORDS):
        return False
    batch = header + struct.unpack_from("<I", message, header)[0]
    if message[kind] == _DICTIONARY:
        data = _field(message, batch, _DATA)
        batch = data + struct.unpack_from("<I", message, data)[0] if data else batch
    return bool(_field(message, batch, _COMPRESSION))


def _field(message: bytes, table: int, number: int) -> int:
    """Return where a flatbuffer table's field is; 0 where it has none."""
    names = table - struct.unpack_from("<i", message, table)[0]
    (size,) = struct.unpack_from("<H", message, names)
    entry = 4 + 2 * number
    offset = struct.unpack_from("<H", message, names + entry)[0] if entry < size else 0
    return table + offset if offset else 0
