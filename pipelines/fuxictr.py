# SPDX-License-Identifier: MIT
"""Import FuxiCTR's dataset configuration: python -m pipelines.fuxictr CONFIG [--output FILE].

CONFIG is a dataset_config.yaml: per dataset `feature_cols` (name or a list of names, active, dtype,
type, vocab_size, max_len, share_embedding, ...) and `label_col`. The answer is a schema of this
project with the same columns. What has no counterpart (fill_na, encoders, pretrained embeddings,
min_categr_count) is listed as a remark: nothing is dropped in silence. Of the functions that
`preprocess` names, `convert_to_bucket` becomes `log_square`, the hours and days of `convert_hour`,
`convert_weekday` and `convert_weekend` become `hour_of_day` and `hour_of_week`, and `copy_from(A)`
reads column A; any other is refused.

There a field has a vocabulary that is built from the training file; here ids are hashed, so a table
needs a size: four times `vocab_size` where the configuration knows it, else --num-embeddings.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from embeddings.schema.plain import suggest
from embeddings.schema.schema import schema_from_dict
from embeddings.schema.strict_yaml import load_yaml, parse_yaml
from trainer.runtime.program import Parser, program, quiet_pipe

_KNOWN = {
    *("name", "active", "dtype", "type", "vocab_size", "max_len", "share_embedding", "source"),
    *("embedding_dim", "normalizer", "preprocess", "splitter", "padding", "feature_encoder"),
    *("fill_na", "na_value", "min_categr_count", "oov_idx", "pooling", "encoder", "remap"),
    *("category_processor", "num_buckets", "pretrained_emb", "pretrain_dim", "pretrain_usage"),
    *("freeze_emb", "emb_output_dim"),
}
# What takes effect there and has no counterpart here.
_REMARKED = {
    "fill_na": "nulls stay missing",
    "na_value": "nulls stay missing",
    "min_categr_count": "a dynamic table's min_occurrences does the same",
    "feature_encoder": "choose a tower's tokenizer",
    "encoder": "lists become bags",
    "normalizer": "numbers are standardized",
    "pretrained_emb": "tables begin at random",
    "pretrain_usage": "tables begin at random",
    "emb_output_dim": "widths are the table's",
}
_SIZES = ("vocab_size", "embedding_dim", "max_len", "num_buckets", "pretrain_dim")
_PREPROCESS = ("convert_to_bucket", "convert_hour", "convert_weekday", "convert_weekend")
_BUCKET_ROWS, _HOUR_ROWS, _WEEK_ROWS = 512, 32, 256
_PROCESSORS = ("hash_bucket", "quantile_bucket")
_LARGEST = 10**12
_COPY = re.compile(r"copy_from\(\s*([^()\s]+)\s*\)")
_TYPES = ("categorical", "numeric", "sequence", "embedding", "meta")
_ITEM_SOURCES = ("item", "ad", "target")


def convert(values: dict[str, Any], dataset: str, num_embeddings: int, dim: int) -> tuple[str, str]:
    """Return the schema of `dataset` (empty: the only one) as YAML, and the dataset's name.

    Args:
        num_embeddings: rows of a table whose vocabulary the configuration does not know.
        dim: the width of vectors that say none.

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
            f"{name}: expected feature_cols and label_col with a name, got "
            f"{sorted(map(str, part))}; a dataset that is already built keeps its columns in "
            "feature_map.json: import the configuration that it was built from"
        )
    schema, remarks = _Import(num_embeddings, dim, part.get("min_categr_count")).of(columns)
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
    schema_from_dict(parse_yaml(text, name), f"the schema of {name}")
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
    _check_preprocess(feature, place)
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


def _check_preprocess(feature: dict[str, Any], place: str) -> None:
    """Refuse functions and processors that have no counterpart: the column would mean another."""
    function = feature.get("preprocess")
    if function and function not in _PREPROCESS and not _COPY.fullmatch(str(function)):
        raise ValueError(
            f"{place}.preprocess: expected one of {list(_PREPROCESS)} or copy_from(COLUMN), got "
            f"{function!r}; compute the column before ingestion, and remove the setting"
        )
    processor = feature.get("category_processor")
    if processor and processor not in _PROCESSORS:
        raise ValueError(
            f"{place}.category_processor: expected one of {list(_PROCESSORS)}, got {processor!r}; "
            "remove it to hash the ids"
        )


class _Import:
    """Tables and features of one dataset, column by column.

    Args:
        num_embeddings: rows of a table whose vocabulary is not known.
        dim: the width of vectors that say none.
        min_count: the dataset's own min_categr_count.
    """

    def __init__(self, num_embeddings: int, dim: int, min_count: Any) -> None:
        self.num_embeddings, self.dim = num_embeddings, dim
        self.tables: dict[str, dict[str, Any]] = {}
        self.sparse: list[dict[str, Any]] = []
        self.dense: list[dict[str, Any]] = []
        self.remarks: list[str] = []
        self.hour = ""
        if min_count not in (None, 0, 1, ""):
            self._pass_over("all columns", "min_categr_count", min_count)

    def of(self, columns: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
        """Return the schema's parts, and remarks."""
        hours = [one["name"] for one in columns if one.get("preprocess") == "convert_hour"]
        self.hour = hours[0] if hours else ""
        for column in columns:
            for key in _REMARKED:
                if column.get(key) not in (None, "", 0):
                    self._pass_over(column["name"], key, column[key])
            self._column(column)
        sequences = [found["name"] for found in self.sparse if found.get("kind") == "bag"]
        if sequences:
            self.remarks.append(
                f"{', '.join(sequences)}: read as bags; lists that are one history, oldest first, "
                "are `kind: sequence, history: NAME`"
            )
        schema: dict[str, Any] = {"tables": list(self.tables.values()), "sparse": self.sparse}
        if self.dense:
            schema["dense"] = self.dense
        if self.hour:
            schema["timestamp"] = self.hour
            self.remarks.append(
                f"{self.hour}: read as the rows' time; ingest with --timestamp-format '%y%m%d%H' "
                "where it is written as 14102100"
            )
        return schema, self.remarks

    def _pass_over(self, name: str, key: str, value: Any) -> None:
        self.remarks.append(
            f"{name}: {key} {value} has no counterpart and is not taken over: {_REMARKED[key]}"
        )

    def _column(self, column: dict[str, Any]) -> None:
        name, function = column["name"], str(column.get("preprocess") or "")
        if column["type"] == "embedding":
            width = column.get("pretrain_dim", "some")
            self.remarks.append(
                f"{name}: a vector of {width} numbers a row is left out: no feature reads one; "
                "write its numbers as columns of their own, which are dense features"
            )
        elif function in ("convert_hour", "convert_weekday", "convert_weekend"):
            self._time(name, function)
        elif column["type"] == "numeric":
            self.dense.append({"name": name, "transform": "log1p", "standardize": True})
        else:
            self._sparse(column, _COPY.fullmatch(function))

    def _time(self, name: str, function: str) -> None:
        """Make hours of the rows' time."""
        if not self.hour:
            raise ValueError(
                f"{name}.preprocess: {function} is computed of the hour, and no column has "
                "convert_hour; add that column, or compute this one before ingestion"
            )
        if function == "convert_weekend":
            self.remarks.append(f"{name}: left out, hour_of_week tells the weekend too")
            return
        transform = "hour_of_day" if function == "convert_hour" else "hour_of_week"
        rows = _HOUR_ROWS if function == "convert_hour" else _WEEK_ROWS
        self.tables[name] = {"name": name, "num_embeddings": rows, "embedding_dim": self._width({})}
        found = {"name": name, "table": name, "transform": transform}
        self.sparse.append(found if name == self.hour else {**found, "column": self.hour})

    def _width(self, column: dict[str, Any]) -> int:
        return -(-(column.get("embedding_dim") or self.dim) // 4) * 4

    def _sparse(self, column: dict[str, Any], copied: re.Match[str] | None) -> None:
        name, width = column["name"], self._width(column)
        table = str(column.get("share_embedding") or name).replace(".", "_")
        vocabulary = column.get("vocab_size")
        rows = max(4 * vocabulary, 1_024) if vocabulary else self.num_embeddings
        found: dict[str, Any] = {"name": name, "table": table}
        if copied:
            found["column"] = copied[1]
        if column.get("preprocess") == "convert_to_bucket":
            found["transform"], rows = "log_square", _BUCKET_ROWS
            self.remarks.append(f"{name}: convert_to_bucket is `transform: log_square`")
        elif column.get("category_processor") == "hash_bucket":
            rows = column.get("num_buckets", 10) + 1
        elif column.get("category_processor"):
            found["transform"], rows = "log_quarter", _BUCKET_ROWS
            self.remarks.append(f"{name}: quantile buckets become `transform: log_quarter`")
        held = self.tables.setdefault(
            table, {"name": table, "num_embeddings": rows, "embedding_dim": width}
        )
        if held["embedding_dim"] != width:
            taken = f"{table}'s is {held['embedding_dim']} wide"
            self.remarks.append(f"{name}: embedding_dim {width} is not taken over: {taken}")
        held["num_embeddings"] = max(held["num_embeddings"], rows)
        if column["type"] == "sequence":
            found |= {"kind": "bag", "max_length": column.get("max_len") or 50}
            if column.get("splitter"):
                self.remarks.append(
                    f"{name}: lists in text; ingest with --list-separator {column['splitter']!r}"
                )
        if column.get("source") in _ITEM_SOURCES:
            found["side"] = "item"
        self.sparse.append(found)


def _flow(value: Any) -> str:
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = Parser(
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
        values = load_yaml(given.config)
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
    except (ValueError, OSError) as error:
        print(f"error: {_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))
