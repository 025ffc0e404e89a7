# SPDX-License-Identifier: MIT
"""Import FuxiCTR's dataset configuration: python -m pipelines.fuxictr CONFIG [--output FILE].

CONFIG is a dataset_config.yaml: per dataset `feature_cols` (name or a list of names, active, dtype,
type, vocab_size, max_len, share_embedding, ...) and `label_col`. The answer is a schema of this
project with the same columns. What has no counterpart (fill_na, encoders, pretrained embeddings,
min_categr_count) is listed as a remark: nothing is dropped in silence.

There a field has a vocabulary that is built from the training file; here ids are hashed, so a table
needs a size: four times `vocab_size` where the configuration knows it, else --num-embeddings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from embeddings.schema.plain import suggest
from embeddings.schema.schema import schema_from_dict
from trainer.runtime.program import program

_KNOWN = {
    *("name", "active", "dtype", "type", "vocab_size", "max_len", "share_embedding", "source"),
    *("embedding_dim", "normalizer", "preprocess", "splitter", "padding", "feature_encoder"),
    *("fill_na", "min_categr_count", "oov_idx", "pooling"),
}
# What takes effect there and has no counterpart here.
_REMARKED = ("fill_na", "preprocess", "min_categr_count", "feature_encoder", "normalizer")
_SIZES = ("vocab_size", "embedding_dim", "max_len")
_LARGEST = 10**12
_TYPES = ("categorical", "numeric", "sequence", "meta")
_ITEM_SOURCES = ("item", "ad", "target")


def convert(values: dict[str, Any], dataset: str, num_embeddings: int, dim: int) -> tuple[str, str]:
    """Return the schema of `dataset` (empty: the only one) as YAML, and the dataset's name.

    num_embeddings: rows of a table whose vocabulary the configuration does not know. dim: the width
    of vectors that say none.

    Raises:
        ValueError: no such dataset, or a feature that cannot be read; its place is named.
    """
    parts = {str(name): part for name, part in values.items() if isinstance(part, dict)}
    name = dataset or (next(iter(parts)) if len(parts) == 1 else "")
    if name not in parts:
        raise ValueError(
            f"dataset {dataset!r}: expected one of {list(parts)}{suggest(dataset, parts)}; name "
            "one with --dataset"
        )
    part = parts[name]
    features = part.get("feature_cols") or []
    if not isinstance(features, list):
        raise ValueError(
            f"{name}.feature_cols: expected a list of features, got {type(features).__name__}"
        )
    columns = []
    for number, feature in enumerate(features):
        columns += _columns(feature, f"{name}.feature_cols[{number}]")
    labels = part.get("label_col")
    labels = labels if isinstance(labels, list) else [labels]
    if not columns or not all(isinstance(label, dict) and label.get("name") for label in labels):
        raise ValueError(
            f"{name}: expected feature_cols and label_col with a name, got {sorted(map(str, part))}"
        )
    schema, remarks = _schema(columns, num_embeddings, dim)
    schema["labels"] = [{"name": label["name"]} for label in labels if label]
    group = part.get("group_id")
    if group:
        schema["user"] = group
    head = [f"{name}, imported from FuxiCTR's dataset configuration.", *remarks]
    lines = [f"# {' '.join(line.split())}" for line in head]  # a remark never ends in its middle
    for key, value in schema.items():
        if isinstance(value, list):
            lines += [f"{key}:", *(f"  - {_flow(item)}" for item in value)]
        else:
            lines.append(f"{key}: {_flow(value)}")
    text = "\n".join(lines) + "\n"
    schema_from_dict(yaml.safe_load(text), f"the schema of {name}")
    return text, name


def _columns(feature: Any, place: str) -> list[dict[str, Any]]:
    """Return one description a column of a feature, which may name several."""
    if not isinstance(feature, dict) or "name" not in feature:
        raise ValueError(f"{place}: expected a mapping with a name, got {feature!r}")
    unknown = sorted({str(key) for key in feature} - _KNOWN)
    if unknown:
        raise ValueError(
            f"{place}.{unknown[0]}: not known here{suggest(unknown[0], _KNOWN)}; remove it, or say "
            "what it means in the schema by hand"
        )
    kind = feature.get("type", "categorical")
    if kind not in _TYPES:
        raise ValueError(f"{place}.type: expected one of {list(_TYPES)}, got {kind!r}")
    active = feature.get("active", True)
    if active not in (True, False):  # in quotes it is text, and every text is true
        raise ValueError(f"{place}.active: expected true or false (no quotes), got {active!r}")
    if not active or kind == "meta":
        return []
    names = feature["name"] if isinstance(feature["name"], list) else [feature["name"]]
    for name in (*names, feature.get("share_embedding") or ""):
        if name is None or isinstance(name, dict | list):
            raise ValueError(f"{place}: expected names of columns and tables, got {name!r}")
    numbers = {key: _number(feature[key], f"{place}.{key}") for key in _SIZES if feature.get(key)}
    return [{**feature, **numbers, "name": str(name), "type": kind} for name in names]


def _number(value: Any, place: str) -> int:
    """Return a whole number above zero, also if YAML took it for text (1e6)."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 1 <= number <= _LARGEST or number % 1:
        raise ValueError(f"{place}: expected a whole number from 1 to {_LARGEST:,}, got {value!r}")
    return int(number)


def _schema(
    columns: Sequence[dict[str, Any]], num_embeddings: int, dim: int
) -> tuple[dict[str, Any], list[str]]:
    """Return tables, sparse and dense features, and remarks."""
    tables: dict[str, dict[str, Any]] = {}
    sparse, dense, remarks = [], [], []
    for column in columns:
        name = column["name"]
        for key in _REMARKED:
            if column.get(key) not in (None, "", 0):
                remarks.append(
                    f"{name}: {key} {column[key]} has no counterpart and is not taken over"
                )
        if column["type"] == "numeric":
            dense.append({"name": name, "transform": "log1p", "standardize": True})
            continue
        table = str(column.get("share_embedding") or name).replace(".", "_")
        vocabulary = column.get("vocab_size")
        rows = max(4 * vocabulary, 1_024) if vocabulary else num_embeddings
        width = -(-(column.get("embedding_dim") or dim) // 4) * 4
        held = tables.setdefault(
            table, {"name": table, "num_embeddings": rows, "embedding_dim": width}
        )
        if held["embedding_dim"] != width:
            taken = f"{table}'s is {held['embedding_dim']} wide"
            remarks.append(f"{name}: embedding_dim {width} is not taken over: {taken}")
        held["num_embeddings"] = max(held["num_embeddings"], rows)
        found: dict[str, Any] = {"name": name, "table": table}
        if column["type"] == "sequence":
            found |= {"kind": "bag", "max_length": column.get("max_len") or 50}
            if column.get("splitter"):
                remarks.append(
                    f"{name}: lists in text; ingest with --list-separator {column['splitter']!r}"
                )
        if column.get("source") in _ITEM_SOURCES:
            found["side"] = "item"
        sparse.append(found)
    sequences = [found["name"] for found in sparse if found.get("kind") == "bag"]
    if sequences:
        remarks.append(
            f"{', '.join(sequences)}: read as bags; lists that are one history, oldest first, "
            "are `kind: sequence, history: NAME`"
        )
    schema: dict[str, Any] = {"tables": list(tables.values()), "sparse": sparse}
    if dense:
        schema["dense"] = dense
    return schema, remarks


def _flow(value: Any) -> str:
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog=program("pipelines.fuxictr"),
        description="Import FuxiCTR's dataset_config.yaml as a schema.",
    )
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG", help="a dataset_config.yaml")
    add("--dataset", default="", metavar="NAME", help="which of several (default: the only one)")
    add("--output", type=Path, metavar="FILE", help="the schema's file (default: print it)")
    rows = "rows of a table whose vocabulary is not known (default: 100000)"
    add("--num-embeddings", type=int, default=100_000, metavar="ROWS", help=rows)
    add("--dim", type=int, default=16, help="width of vectors that say none (default: 16)")
    given = parser.parse_args(arguments)
    try:
        values = yaml.safe_load(given.config.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(
                f"{given.config}: expected datasets by name, got {type(values).__name__}"
            )
        text, name = convert(values, given.dataset, given.num_embeddings, given.dim)
        if given.output is None:
            print(text, end="")
        elif given.output.exists():
            raise ValueError(f"{given.output}: exists; choose another --output")
        else:
            given.output.write_text(text, encoding="utf-8")
            print(f"{given.output}: the schema of {name}")
    except yaml.YAMLError as error:
        print(f"error: {given.config}: not valid YAML: {_line(error)}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        place = f"{given.config}: " if isinstance(error, UnicodeDecodeError) else ""
        print(f"error: {place}{_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
