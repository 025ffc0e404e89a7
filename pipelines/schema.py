# SPDX-License-Identifier: MIT
"""Propose a schema for a log: python -m pipelines.schema PATH [--output schema.yaml].

PATH is a folder of Parquet files (by day or not), a file, or a glob; CSV and TSV too, which have to
be ingested before they train. A sample of the rows is read. What is guessed is marked GUESS, and
what is left out is listed with the reason: read the file once before you believe a metric.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from embeddings.schema.schema import schema_from_dict
from embeddings.schema.strict_yaml import parse_yaml
from pipelines.ingestion.formats import NAMES
from pipelines.ingestion.source import QUOTING, SourceConfig
from pipelines.schema_proposal.proposal import Proposal, propose
from pipelines.schema_proposal.roles import Choices
from pipelines.schema_proposal.sampling import Sample, read_sample
from trainer.runtime.program import Parser, program, quiet_pipe

_SECTIONS = ("tables", "sparse", "dense", "labels")


def write_schema(proposal: Proposal, sample: Sample, source: str) -> str:
    """Return the proposal as YAML with remarks, checked to be read as it is.

    Raises:
        ValueError: it is not a schema (a mistake of the proposal).
    """
    schema, roles = proposal.schema, proposal.roles
    lines = [f"# {line}" for line in _head(sample, source)]
    for section in _SECTIONS:
        if section in schema:
            lines.append(f"{section}:")
            for item in schema[section]:
                remark = roles.remarks.get((section, item["name"]), "")
                lines.append(f"  - {_flow(item)}{f'  # {remark}' if remark else ''}")
    for key in ("user", "timestamp"):
        if key in schema:
            lines.append(f"{key}: {_flow(schema[key])}  # {roles.remarks[key, schema[key]]}")
    if "history_actions" in schema:
        remark = roles.remarks["history_actions", "history"]
        lines.append(f"history_actions: {_flow(schema['history_actions'])}  # {remark}")
    if "user" not in schema:
        lines.append("# No column looks like a user; with `user: COLUMN` there is a GAUC.")
    if roles.left_out:
        lines.append("# Left out:")
        lines += [f"#   {name}: {reason}" for name, reason in roles.left_out.items()]
    text = "\n".join(lines) + "\n"
    schema_from_dict(parse_yaml(text, "the proposal"), "the proposal")
    return text


def next_steps(sample: Sample, proposal: Proposal, source: str, schema: str) -> list[str]:
    """Return the commands that lead from the schema to a report."""
    data, steps = source, []
    if sample.is_text:
        time = proposal.roles.time
        unit = f" --timestamp-unit {proposal.roles.time_unit}" if proposal.roles.time_unit else ""
        day = "" if time else " --day 2026-01-01"
        separators = sorted(set(sample.lists.values()))
        lists = f" --list-separator '{separators[0]}'" if separators else ""
        data = "ingested"
        steps.append(
            f"python -m pipelines.ingest {source} --schema {schema} --output {data}{unit}{day}"
            f"{lists}"
        )
    steps += [
        f"python -m trainer.train dlrm.demo --output runs/first --data.path {data} --data.schema "
        f"{schema}",
        "python -m pipelines.report runs/first",
    ]
    return steps


def _head(sample: Sample, source: str) -> list[str]:
    total = f"{sample.total_rows:,}" if sample.total_rows else "an unknown number of"
    if sample.total_rows > sample.rows and (sample.is_text or sample.files > sample.read_files):
        total = f"about {total}"
    days = f" in {sample.days} days" if sample.days else ""
    return [
        f"Proposed by `python -m pipelines.schema {source}` from {sample.rows:,} of {total} rows,",
        f"{sample.read_files} of {sample.files} files{days}. Lines marked GUESS are for you to "
        "confirm.",
        "Everything a schema can say: embeddings/schema/features.py, embeddings/schema/schema.py.",
    ]


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = _parser().parse_args(arguments)
    delimiter = "\t" if given.delimiter in ("\\t", "tab") else given.delimiter
    source = SourceConfig(
        format=given.format,
        columns=given.columns,
        delimiter=delimiter,
        encoding=given.encoding,
        quoting=given.quoting,
    )
    paths = " ".join(given.paths)
    try:
        if given.output and Path(given.output).exists() and not given.overwrite:
            raise ValueError(
                f"{given.output}: exists, and may hold what you changed; choose another --output, "
                "or pass --overwrite"
            )
        sample = read_sample(given.paths, source)
        choices = Choices(
            labels=given.label, user=given.user, timestamp=given.timestamp, drop=given.drop
        )
        proposal = propose(sample, choices)
        text = write_schema(proposal, sample, paths)
        if given.output:
            Path(given.output).write_text(text, encoding="utf-8")
        else:
            print(text, end="")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.output:
        marked = text.count("GUESS") - 1
        print(f"{given.output}: {marked} guesses to confirm. Then:")
        for step in next_steps(sample, proposal, paths, given.output):
            print(f"  {step}")
    return 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=program("pipelines.schema"),
        description="Propose a schema for a log of Parquet, CSV or TSV files, from a sample.",
    )
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="folders, files or globs of one log")
    add("--output", metavar="FILE", default="", help="the schema's file (default: print it)")
    add("--overwrite", action="store_true", help="replace the file if it exists")
    add("--label", type=_names, default=(), metavar="A,B", help="labels (default: guessed)")
    add("--user", default="", metavar="COLUMN", help="groups rows for GAUC (default: guessed)")
    add("--timestamp", default="", metavar="COLUMN", help="the rows' time (default: guessed)")
    add("--drop", type=_names, default=(), metavar="A,B", help="columns to leave out")
    add("--format", default="", choices=NAMES, help="default: by each file's name")
    add("--columns", type=_names, default=(), metavar="A,B", help="names, for a CSV without header")
    add("--delimiter", default="", metavar="CHAR", help="of a CSV (default: a comma)")
    add("--quoting", default="", choices=QUOTING, help="default: none between tabs, else double")
    add("--encoding", default="utf-8", metavar="NAME", help="of text files (default: utf-8)")
    return parser


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))
