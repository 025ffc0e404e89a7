# SPDX-License-Identifier: MIT
"""What is fuzzed: for each kind its sound inputs, how they are damaged, and who reads them.

A target damages an input in memory, so a case is known by its seed and number alone, and reads it
as a user's command does. `read` returns quietly when the input was taken or refused in the way that
the command documents; anything else that it raises is a finding.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shutil
import zlib
from abc import ABC, abstractmethod
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.fuzz.mutate import BOMB, damage_bytes, damage_tree, dump_json

# Characters that an answer may have.
LONGEST_ANSWER = 20_000


class Target(ABC):
    """One kind of input.

    Attributes:
        name: of the kind.
        folder: where this target may write.
    """

    name = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = folder / "case"
        self.prepare()

    def prepare(self) -> None:  # noqa: B027
        """Make the sound inputs."""

    @abstractmethod
    def damaged(self, random: Random) -> dict[str, bytes]:
        """Return the files of one case, by their names."""

    @abstractmethod
    def read(self, files: dict[str, bytes]) -> None:
        """Write the files and let their reader have them.

        Raises:
            Exception: the reader neither took nor refused them.
        """

    def write(self, files: dict[str, bytes]) -> None:
        """Put the files of a case where the reader looks for them."""
        self.place.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (self.place / name).write_bytes(content)


class Answer(AssertionError):
    """A reader's answer is no answer."""


def check_answer(text: str) -> None:
    """Raise unless a refusal can be read by a person."""
    if len(text) > LONGEST_ANSWER:
        raise Answer(f"the message has {len(text):,} characters")
    if "Traceback" in text:
        raise Answer(f"a trace: {text[-2_000:]}")


def refused(error: Exception) -> None:
    """Check the message of a documented refusal."""
    if not str(error).strip():
        raise Answer(f"a {type(error).__name__} without a message") from error
    check_answer(str(error))


class SchemaTarget(Target):
    """A schema's YAML, read by every command."""

    name = "schema"

    def prepare(self) -> None:
        """Write two schemas out as trees and as text."""
        from tests.support.raw_logs import SCHEMA

        small = {
            "tables": [{"name": "user", "num_embeddings": 100, "embedding_dim": 8}],
            "sparse": [{"name": "user", "table": "user"}],
            "labels": [{"name": "click", "weight": 0.5}],
            "dense": [{"name": "price", "transform": "log1p"}],
            "user": "user",
        }
        self.trees = [small, small, SCHEMA]
        texts = (yaml.safe_dump(tree, sort_keys=False) for tree in self.trees)
        self.texts = [text.encode() for text in texts]

    def damaged(self, random: Random) -> dict[str, bytes]:
        """Return a schema that is damaged as a tree or as text."""
        number = random.randrange(len(self.trees))
        if random.random() < 0.5:
            return {"schema.yaml": damage_bytes(self.texts[number], random)}
        tree = damage_tree(self.trees[number], random)
        if random.random() < 0.2:  # YAML's flow style is nearly JSON
            return {"schema.yaml": dump_json(tree)}
        with contextlib.suppress(RecursionError, yaml.YAMLError, UnicodeError):
            return {"schema.yaml": yaml.safe_dump(tree).encode()}
        return {"schema.yaml": b"[" * 5_000}

    def read(self, files: dict[str, bytes]) -> None:
        """Load the schema."""
        from embeddings.schema.schema import load_schema

        self.write(files)
        try:
            load_schema(self.place / "schema.yaml")
        except ValueError as error:
            refused(error)


class ManifestTarget(Target):
    """A checkpoint's manifest, sealed again after the damage, read by evaluate and resume."""

    name = "manifest"

    def prepare(self) -> None:
        """Make the manifest of a small run."""
        from trainer.checkpoint import layout
        from trainer.config.config import to_dict
        from trainer.recipes.load import load_recipe

        values: dict[str, Any] = {"config": to_dict(load_recipe("dlrm.demo"))}
        for key, kind in layout.RUN.items():
            first = kind[0] if isinstance(kind, tuple) else kind
            values.setdefault(key, first())
        values |= {"files": {"index.json": [10, 10]}, "step": 3, "world_size": 1}
        self.tree, self.seal = values, layout._seal
        self.text = self.seal(values)

    def damaged(self, random: Random) -> dict[str, bytes]:
        """Return a manifest whose seal is right, or damaged bytes."""
        if random.random() < 0.3:
            return {"manifest.json": damage_bytes(self.text, random)}
        # One branch at a time: the configuration is far larger than the rest.
        tree = dict(self.tree)
        if random.random() < 0.5:
            tree["config"] = damage_tree(tree["config"], random)
        else:
            rest = damage_tree({k: v for k, v in tree.items() if k != "config"}, random)
            tree = {**rest, "config": tree["config"]} if isinstance(rest, dict) else rest
        try:
            return {"manifest.json": self.seal(tree)}
        except (RecursionError, ValueError, TypeError):
            return {"manifest.json": dump_json(tree)}

    def read(self, files: dict[str, bytes]) -> None:
        """Read the manifest and its configuration."""
        from trainer.checkpoint.layout import complete, data_folder
        from trainer.evaluation.evaluate import read_config

        step = self.folder / "checkpoints" / "step-3"
        self.place = step
        self.write(files)
        try:
            for path in complete(step.parent):
                _, manifest = read_config(path)
                place = data_folder(path, manifest)
                assert isinstance(place, Path)
                if not place.resolve().is_relative_to(step.resolve()):
                    raise Answer(f"its files are looked for in {place}")
        except ValueError as error:
            refused(error)


class IndexTarget(Target):
    """A checkpoint's index and shard, their checksums made right again, read by what loads."""

    name = "index"

    def prepare(self) -> None:
        """Save a checkpoint of two tensors."""
        from trainer.checkpoint import dcp, layout
        from trainer.checkpoint.dcp_index import INDEX

        path = dcp.save(self.tensors(), self.folder / "sound", 1, {})
        assert isinstance(path, Path)
        self.index, self.seal = INDEX, layout._seal
        self.files = {one.name: one.read_bytes() for one in path.iterdir() if one.is_file()}
        self.manifest = json.loads(self.files.pop("manifest.json"))
        self.manifest.pop("checksum")
        self.tree = json.loads(self.files[INDEX])
        self.place = self.folder / "case" / "step-1"
        shutil.copytree(path, self.place)

    @staticmethod
    def tensors() -> dict[str, Any]:
        """Return what is saved and loaded."""
        import torch

        return {"model": {"w": torch.arange(6.0).view(2, 3)}, "random": {"r": torch.ones(4)}}

    def damaged(self, random: Random) -> dict[str, bytes]:
        """Return an index that is damaged as bytes or as a tree, or code in its place."""
        files = dict(self.files)
        kind = random.random()
        if kind < 0.3:
            files[self.index] = damage_bytes(files[self.index], random)
        elif kind < 0.9:
            files[self.index] = dump_json(damage_tree(self.damaged_entries(random), random))
        else:
            files[self.index] = pickle.dumps(_Bomb())
        for name in files:
            if name != self.index and random.random() < 0.3:
                files[name] = random.choice(
                    (damage_bytes(files[name], random), pickle.dumps(_Bomb()))
                )
        sums = {name: [len(text), zlib.crc32(text)] for name, text in files.items()}
        manifest = {**self.manifest, "files": sums}
        if random.random() < 0.2:
            manifest["files"] = damage_tree(sums, random)
        try:
            return {**files, "manifest.json": self.seal(manifest)}
        except (RecursionError, ValueError, TypeError):
            return {**files, "manifest.json": dump_json(manifest)}

    def damaged_entries(self, random: Random) -> Any:
        """Return the index with numbers and names in it that are nearly right."""
        tree = json.loads(json.dumps(self.tree))
        entry = random.choice(list(tree["tensors"].values()))
        chunk = random.choice(entry["chunks"])
        numbers = (-1, 0, 1, 2, 3, 7, 40, 2**31, 2**40, 2**63, 2**70, 1.0, True, "1", None)
        names = ("../../../fuzz-escape", "/fuzz-escape", "", "a\x00b", self.index, "manifest.json")
        where = random.randrange(6)
        if where == 0:
            chunk[2] = random.choice(names)
        elif where == 1:
            chunk[3] = random.choice(numbers)
        elif where == 2:
            entry["dtype"] = random.choice(("int64", "float64", "bool", "Tensor", "load", "qint8"))
        elif where == 3:
            entry["size"] = [random.choice(numbers) for _ in range(random.randrange(4))]
        elif where == 4:
            chunk[random.randrange(2)] = [random.choice(numbers) for _ in range(2)]
        elif where == 5:
            entry["chunks"] = entry["chunks"] * random.choice((0, 2, 1_000))
        return tree

    def read(self, files: dict[str, bytes]) -> None:
        """Load the tensors, and ask for names and sizes."""
        from trainer.checkpoint import dcp

        self.write(files)
        for call in (dcp.tensor_names, dcp.tensor_sizes, self.load):
            try:
                call(self.place)
            except ValueError as error:
                refused(error)

    def load(self, path: Path) -> None:
        """Load into tensors of the right shape."""
        from trainer.checkpoint import dcp

        dcp.load(self.tensors(), path)


class _Bomb:
    """Imports the bomb where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return __import__, (BOMB,)


class ReportTarget(Target):
    """The files of a run's folder, read by the report."""

    name = "report"

    def prepare(self) -> None:
        """Write a run's folder."""
        from tests.support.report_pages import write_run

        run = write_run(self.folder / "sound", charts=False)
        self.files = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
        from trainer.config.config import to_dict
        from trainer.recipes.load import load_recipe

        config = to_dict(load_recipe("dlrm.demo"))
        self.files["config.json"] = json.dumps(config).encode()
        metrics = json.loads(self.files["metrics.json"])
        metrics |= {"ceiling_auc": 0.75, "alerts": ["one"], "epochs": [{"auc": 0.7}]}
        self.files["metrics.json"] = json.dumps(metrics).encode()
        self.names = ["config.json", "metrics.json", *sorted(self.files)]
        self.written: dict[str, bytes] = {}
        self.place.mkdir()

    def damaged(self, random: Random) -> dict[str, bytes]:
        """Return the folder's files with one or two damaged."""
        files = dict(self.files)
        for name in random.sample(self.names, random.choice((1, 1, 2))):
            text = files[name]
            if random.random() < 0.3:
                files[name] = damage_bytes(text, random)
                continue
            with contextlib.suppress(ValueError, RecursionError):  # damaged already
                if name.endswith("l"):
                    lines = [json.loads(line) for line in text.splitlines()]
                    tree = damage_tree(lines, random)
                    lines = tree if isinstance(tree, list) else [tree]
                    files[name] = b"".join(dump_json(line) + b"\n" for line in lines)
                else:
                    files[name] = dump_json(damage_tree(json.loads(text), random))
        return files

    def read(self, files: dict[str, bytes]) -> None:
        """Write the page."""
        from pipelines import report

        for name, content in files.items():
            if self.written.get(name) != content:
                (self.place / name).write_bytes(content)
        self.written = files
        page = self.folder / "report.html"
        page.unlink(missing_ok=True)
        check_command(report.main, [str(self.place), "--output", str(page)])
        if page.exists() and "<script>fuzz" in page.read_text(encoding="utf-8"):
            raise Answer("a text of the folder is a script in the page")


class IngestTarget(Target):
    """A file of a log, read by ingestion.

    The schema and the options are read once, as no case changes them. One case of 64 goes through
    the command line, one of four has the schema of all columns, the others that of a few, and one
    of four may have bad rows only, so that what is left of them is written.
    """

    suffix = ""

    def prepare(self) -> None:
        """Write the schema, and build the two schemas and two settings."""
        from embeddings.schema.schema import load_schema, schema_from_dict
        from pipelines.ingestion.ingestion import IngestConfig
        from tests.support.raw_logs import SCHEMA

        self.path = self.folder / "schema.yaml"
        self.path.write_text(yaml.safe_dump(SCHEMA))
        small = {name: SCHEMA[name] for name in ("dense", "labels", "timestamp")}
        parts = {"tables": SCHEMA["tables"][:2], "sparse": [SCHEMA["sparse"][0], _HISTORY]}
        self.schemas = [load_schema(self.path), schema_from_dict({**small, **parts})]
        shares = (1.0, 0.01)
        self.configs = [IngestConfig(list_separator="|", max_bad_share=one) for one in shares]
        self.texts = self.sound()

    @abstractmethod
    def sound(self) -> list[bytes]:
        """Return the contents of sound files."""

    def damaged(self, random: Random) -> dict[str, bytes]:
        """Return a damaged file."""
        return {f"log.{self.suffix}": damage_bytes(random.choice(self.texts), random)}

    def read(self, files: dict[str, bytes]) -> None:
        """Ingest the file."""
        from pipelines import ingest

        self.write(files)
        (content,) = files.values()
        draw = zlib.crc32(content) % 64
        output, log = self.folder / "out", str(self.place / f"log.{self.suffix}")
        shutil.rmtree(output, ignore_errors=True)
        if not draw:
            words = [log, "--schema", str(self.path), "--output", str(output)]
            check_command(ingest.main, [*words, "--list-separator", "|"])
            return
        schema, config = self.schemas[draw % 4 > 0], self.configs[draw // 4 % 4 > 0]
        try:
            summary = ingest.ingest([log], schema, output, config)
        except (ValueError, RuntimeError, OSError) as error:
            refused(error)
            return
        check_answer(ingest.describe(summary))
        if summary.rows_in != sum(summary.days.values()) + summary.rows_bad:
            raise Answer(f"rows are lost: {summary}")


_HISTORY = {"name": "hist", "table": "item", "kind": "bag", "max_length": 5}


class CsvTarget(IngestTarget):
    """A CSV file."""

    name, suffix = "csv", "csv"

    def sound(self) -> list[bytes]:
        """Return a file of nine rows."""
        from tests.support.raw_logs import COLUMNS, GOOD

        rows = [COLUMNS, *GOOD, *GOOD, *GOOD]
        return ["\n".join(",".join(map(str, row)) for row in rows).encode() + b"\n"]


class JsonTarget(IngestTarget):
    """A file of JSON Lines."""

    name, suffix = "json", "jsonl"

    def sound(self) -> list[bytes]:
        """Return the same rows with lists, and with lists as text."""
        from tests.support.raw_logs import COLUMNS, GOOD

        texts = [dict(zip(COLUMNS, row, strict=True)) for row in GOOD]
        lists = [
            {**row, **{name: row[name].split("|") for name in ("hist", "age", "action")}}
            for row in texts
        ]
        lists[0] |= {"click": True, "price": 1.5, "hist": ["sh\u00f6e", None], "more": {"a": [1]}}
        files = ([json.dumps(row) for row in rows * 2] for rows in (texts, lists))
        return ["\n".join(lines).encode() + b"\n" for lines in files]


class ParquetTarget(IngestTarget):
    """A Parquet file."""

    name, suffix = "parquet", "parquet"

    def sound(self) -> list[bytes]:
        """Return a file without compression and one with."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        from tests.support.raw_logs import NOON

        table = pa.table(
            {
                "user": ["7", "8", None],
                "item": ["shoe", "hat", "bag"],
                "slot": [3, 0, 98],
                "hist": [["shoe"], [], ["bag", "hat"]],
                "age": [[90], [], [70, 5]],
                "action": [[1], [], [3, 0]],
                "price": [1.5, None, -2e3],
                "click": [1, 0, 0],
                "ts": [NOON, NOON + 1, NOON + 2],
            }
        )
        found = []
        for compression in ("none", "zstd"):
            sink = io.BytesIO()
            pq.write_table(table, sink, compression=compression)
            found.append(sink.getvalue())
        return found


def check_command(main: Any, words: list[str]) -> None:
    """Run a command and check how it ends and what it says."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main(words)
    if code not in (0, 1, 2):
        raise Answer(f"exit code {code}")
    text = errors.getvalue()
    if code and not text.strip():
        raise Answer(f"exit code {code} without a message")
    check_answer(text)


TARGETS: dict[str, type[Target]] = {
    one.name: one
    for one in (
        *(SchemaTarget, ManifestTarget, IndexTarget, ReportTarget),
        *(CsvTarget, JsonTarget, ParquetTarget),
    )
}
