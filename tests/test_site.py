# SPDX-License-Identifier: MIT
"""The site's sources are whole: every page has a place, every link a target, every name a line."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from embeddings.schema.features import DenseFeature, Label, SparseFeature
from embeddings.schema.lifetime import DynamicConfig
from embeddings.schema.schema import Schema, Table
from tests.site import drawings, generate
from trainer.config.names import names
from trainer.config.overrides import setting_names
from trainer.metrics.spec import METRICS
from trainer.recipes.load import load_recipe

NAV = (generate.ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "source"
    generate.generate(folder)
    return folder


def test_every_page_has_a_place_in_the_navigation_and_every_place_a_page(site):
    pages = {str(path.relative_to(site)) for path in site.rglob("*.md")}
    places = re.findall(r"^ +- [^:]+: (\S+\.md)$", NAV, re.MULTILINE)
    assert sorted(places) == sorted(pages)


def test_every_relative_link_leads_to_a_page_or_a_file_of_the_site(site):
    broken = []
    for page in site.rglob("*.md"):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
            if not (page.parent / link).resolve().is_file():
                broken.append((str(page.relative_to(site)), link))
    assert not broken


def test_the_reference_has_a_meaning_for_every_setting_key_metric_and_recipe(site):
    folder = site / generate.REFERENCE
    text = {path.stem: path.read_text("utf-8") for path in folder.glob("*.md")}
    kinds = (Schema, Table, SparseFeature, DenseFeature, Label, DynamicConfig)
    keys = {one.name for kind in kinds for one in dataclasses.fields(kind) if one.init}
    expected = {
        "settings": setting_names(load_recipe("dlrm.demo")),
        "schema": keys,
        "metrics": METRICS,
        "recipes": names().recipes,
    }
    for page, wanted in expected.items():
        rows = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", text[page], re.MULTILINE))
        assert set(wanted) <= rows.keys(), page
        empty = [name for name in wanted if not rows[name].rpartition("|")[2].strip()]
        assert not empty, page


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_drawing_is_the_one_that_is_committed_and_needs_nothing_from_outside(name):
    drawn = drawings.DRAWINGS[name]()
    assert (drawings.DOCS / name).read_text("utf-8") == drawn, "python -m tests.site.drawings"
    root = ElementTree.fromstring(drawn)
    width, height = (float(root.attrib[key]) for key in ("width", "height"))
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, w, h = (float(box.attrib[key]) for key in ("x", "y", "width", "height"))
        assert x + w <= width and y + h <= height
    assert not re.search(r"<script|href=|url\((?!#)", drawn)


def test_a_text_that_does_not_fit_its_box_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        drawings.Box(0, 0, 60, 40, "a title that is too long").draw()


def test_lists_are_indented_as_the_site_reads_them():
    text = "1. one\n   ```bash\n   ls\n   ```\n\n   more\n2. two\n- a\n  b\nplain\n   not a list"
    assert generate.indented(text) == (
        "1. one\n    ```bash\n    ls\n    ```\n\n    more\n2. two\n- a\n    b\nplain\n   not a list"
    )
