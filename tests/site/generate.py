# SPDX-License-Identifier: MIT
"""Write the sources of the site: python -m tests.site.generate FOLDER.

FOLDER gets every document of the repository at its own path, so that links between them hold, and
reference pages made from the code: settings, schema, metrics, recipes. `make docs` builds the site
from there with MkDocs, strictly. Links and anchors are checked there and in tests/test_site.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from embeddings.schema.features import DenseFeature, Label, SparseFeature
from embeddings.schema.lifetime import DynamicConfig
from embeddings.schema.schema import Schema, Table
from trainer.config.names import names
from trainer.config.overrides import sections
from trainer.metrics.spec import CONTEXT, METRICS
from trainer.metrics.validity import ADVICE
from trainer.recipes.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "docs/reference"
_FOLDERS = ("docs", "deploy", "tests/faults", "embeddings", "models", "trainer", "pipelines")
_TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
# Files that documents link to, beside other documents.
_LINKED = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
# `    name: what it means`, and the lines that go on with it.
_ENTRY = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def documents() -> list[Path]:
    """Return every document of the site, as a path in the repository."""
    found = [path for folder in _FOLDERS for path in (ROOT / folder).rglob("*.md")]
    return [*(Path(name) for name in _TOP), *sorted(path.relative_to(ROOT) for path in found)]


def generate(output: Path) -> None:
    """Write the sources of the site below `output`, which is made anew."""
    shutil.rmtree(output, ignore_errors=True)
    for path in documents():
        text = (ROOT / path).read_text(encoding="utf-8")
        _write(output / path, indented(text))
        for linked in _LINKED.findall(text):
            target = ((ROOT / path).parent / linked).resolve()
            if target.is_file() and target.suffix != ".md":
                place = output / target.relative_to(ROOT)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(target, place)
    for name, page in PAGES.items():
        _write(output / REFERENCE / f"{name}.md", page())


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def indented(text: str) -> str:
    """Return a document whose lists are indented by four columns, as MkDocs reads them."""
    lines, width = [], 0
    for line in text.split("\n"):
        item = re.match(r"(\d+\.|-) +", line)
        if item:
            width = len(item[0])
        elif line.strip() and not line.startswith(" " * (width or 1)):
            width = 0
        more = 0 if item or not width or not line.strip() else max(4 - width, 0)
        lines.append(" " * more + line)
    return "\n".join(lines)


def settings_page() -> str:
    """Return every setting of training with its default, from the docstrings of the sections."""
    config = load_recipe("dlrm.demo")
    parts = [
        "# Settings of training",
        "Every setting of `python -m trainer.train RECIPE`, section by section. Values are those "
        "of the recipe `dlrm.demo`; `--help SECTION` after another recipe shows its own. How to "
        "use them: [training settings](../training.md).",
    ]
    for section, own in sections(config):
        if not own:
            continue
        name = own[0].name.rpartition(".")[0].lstrip("-") or "run"
        meanings = described(type(section))
        parts += [
            f"## {name}",
            _first(type(section)),
            "| setting | value | meaning |\n|---|---|---|",
        ]
        rows = []
        for one in own:
            field = one.name.rpartition(".")[2].lstrip("-").replace("-", "_")
            rows.append(_row(f"`{one.name}`", f"`{_value(one.value)}`", meanings.get(field, "")))
        parts[-1] += "\n" + "\n".join(rows)
    return "\n\n".join(parts) + "\n"


def schema_page() -> str:
    """Return every key of a schema, from the docstrings of its classes."""
    parts = [
        "# Keys of a schema",
        "Every key of `schema.yaml`. How to write one: [schema](../schema.md). An unknown key is "
        "an error that gives its path.",
    ]
    for kind in (Schema, Table, SparseFeature, DenseFeature, Label, DynamicConfig):
        meanings = described(kind)
        rows = [
            _row(f"`{one.name}`", _default(one), meanings.get(one.name, ""))
            for one in dataclasses.fields(kind)
            if one.init
        ]
        table = "| key | default | meaning |\n|---|---|---|\n" + "\n".join(rows)
        parts += [f"## {kind.__name__}", _first(kind), table]
    return "\n\n".join(parts) + "\n"


def metrics_page() -> str:
    """Return the metrics, what stands beside them, and the alerts of an evaluation."""
    better = {"higher": "higher", "lower": "lower", "one": "the nearer to 1"}
    rows = [
        _row(f"`{name}`", one.title, one.meaning, better[one.better], one.unit or "–")
        for name, one in METRICS.items()
    ]
    beside = [_row(f"`{name}`", meaning) for name, meaning in CONTEXT.items()]
    alerts = [_row(f"`{name}`", advice) for name, advice in ADVICE.items()]
    parts = [
        "# Metrics",
        "What metrics.json holds of an evaluation; with several labels also under `LABEL_` and the "
        "name. Metrics of a running job: [Prometheus](../../deploy/METRICS.md).",
        "| key | name | meaning | better | unit |\n|---|---|---|---|---|\n" + "\n".join(rows),
        "## Beside them",
        "| key | meaning |\n|---|---|\n" + "\n".join(beside),
        "## Alerts of an evaluation",
        "| alert | likely causes and way out |\n|---|---|\n" + "\n".join(alerts),
    ]
    return "\n\n".join(parts) + "\n"


def recipes_page() -> str:
    """Return every recipe with its summary."""
    rows = [_row(f"`{name}`", summary) for name, summary in names().recipes.items()]
    parts = [
        "# Recipes",
        "A recipe is TOWER.DATASET: a tower on a log, or on any other log by `--data.schema`. "
        "`python -m trainer.train --list` prints this list.",
        "| recipe | what it is |\n|---|---|\n" + "\n".join(rows),
    ]
    return "\n\n".join(parts) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "settings": settings_page,
    "schema": schema_page,
    "metrics": metrics_page,
    "recipes": recipes_page,
}


def described(kind: type) -> dict[str, str]:
    """Return what a dataclass' docstring says of each field, of its bases too."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        text = inspect.cleandoc(one.__dict__.get("__doc__") or "")
        found |= {match[1]: " ".join(match[2].split()) for match in _ENTRY.finditer(text)}
    return found


def _first(kind: type) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{_value(field.default)}`"
    return "needed" if field.default_factory is dataclasses.MISSING else "empty"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value in ("", (), None) or value == {}:
        return "empty"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _row(*cells: str) -> str:
    return f"| {' | '.join(_cells(cells))} |"


def _cells(cells: tuple[str, ...]) -> Iterator[str]:
    for cell in cells:
        yield cell.replace("|", "\\|").replace("<", "&lt;") if not cell.startswith("`") else cell


def main() -> int:
    """Write the folder that is named, and return the exit code."""
    generate(Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
