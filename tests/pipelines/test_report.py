# SPDX-License-Identifier: MIT
"""The report shows what the runs hold, says what they lack, and stands alone as one file."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from pipelines.report import main, report
from pipelines.reporting.run_data import written
from pipelines.reporting.svg_charts import Axes, Line, chart
from tests.support.report_pages import Page, page, write_run


def test_every_section_and_value_is_on_the_page(tmp_path):
    runs = [
        write_run(tmp_path / "first", 0.74, ceiling_auc=0.76),
        write_run(tmp_path / "second", 0.73, alerts=["auc_stuck"], nonfinite_predictions=3.0),
    ]
    _, found = page(runs, tmp_path)
    for section in ("summary", "alerts", "curves", "ranks", "config"):
        assert section in found.ids
    header = found.row("Run")
    first = dict(zip(header, found.row("first"), strict=True))
    assert first["Tower"] == "SpecFormer" and first["AUC"] == "0.7400"
    assert first["To ceiling"] == "0.0200" and "GAUC" not in header
    assert first["Rows/s"] == "21,000" and first["Input wait"] == "3.4%" and first["Ranks"] == "2"
    assert dict(zip(header, found.row("second"), strict=True))["To ceiling"] == "–"
    for text in ("Training loss", "Running AUC", "rank share: attention map", "exponent τ"):
        assert text in found.text
    for text in ("Cumulative spectrum", "Gradient energy", "Label information"):
        assert text in found.text
    assert "rank share: table" not in found.text, "a table belongs to no layer"
    assert found.row("table 0 (item)")[2] == "0.8000"
    assert found.row("attention 1 (layers.1.attention)")[1:6] == [
        "5.0000",
        "0.6000",
        "2.0000",
        "0.5000",
        "0.0000, 1.0000, 0.1250",
    ]
    assert "auc stuck" in found.text and "3 predictions" in found.text
    assert '"seed": 7' in found.text
    assert "Best by AUC: first. It leads second by 0.0100" in found.text


def test_the_page_needs_no_network_and_no_script(tmp_path):
    text, found = page([write_run(tmp_path / "run")], tmp_path)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", text)
    assert found.count("script") == found.count("link") == found.count("img") == 0
    for _, attributes in found.attributes:
        for name in ("href", "src", "xlink:href"):
            assert attributes.get(name, "#").startswith("#")


def test_the_page_is_accessible_and_has_a_dark_form(tmp_path):
    text, found = page([write_run(tmp_path / "a"), write_run(tmp_path / "b")], tmp_path)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert len(found.ids) == len(set(found.ids)), "ids are unique"
    charts = [attributes for tag, attributes in found.attributes if tag == "svg"]
    assert charts and all(one["role"] == "img" for one in charts)
    assert all(one["aria-labelledby"] in found.ids for one in charts)
    assert found.count("caption") == found.count("table") > 0
    scopes = [attributes.get("scope") for tag, attributes in found.attributes if tag == "th"]
    assert set(scopes) == {"col", "row"}
    assert ("html", {"lang": "en"}) in found.attributes
    for target in (attributes.get("href") for tag, attributes in found.attributes if tag == "a"):
        assert target[1:] in found.ids


def test_what_comes_from_a_run_is_escaped(tmp_path):
    run = write_run(tmp_path / "<img src=x>")
    config = {"model": {"tower": {"type": "<b>T</b>"}}, "path": "</pre><script>alert(1)</script>"}
    (run / "config.json").write_text(json.dumps(config))
    (run / "ranks.json").write_text(
        json.dumps([{"step": 1, "layer": 0, "module": "<i>m</i>", "ferank": 0.5, "<u>": "<s>"}])
    )
    _, found = page([run, write_run(tmp_path / "other", charts=False)], tmp_path)
    for tag in ("script", "img", "b", "i", "u", "s"):
        assert found.count(tag) == 0, tag
    assert "<script>alert(1)</script>" in found.text


def test_what_is_missing_is_said_in_its_place(tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    broken = write_run(tmp_path / "broken", charts=False)
    (broken / "metrics.json").write_text('{"auc": 0.7')
    with (broken / "curves.jsonl").open("a") as file:
        file.write('{"step": 310, "lo')
    _, found = page([bare, broken], tmp_path)
    assert "bare: metrics.json is missing" in found.text
    assert "broken: metrics.json cannot be read" in found.text
    assert "curves.jsonl cannot" not in found.text, "a line that a crash cut short is no error"
    assert "No run has a ranks.json" in found.text
    assert "No run has a tables.jsonl" in found.text
    assert "bare has no config.json" in found.text
    assert found.row("Run")[1:] == ["AUC", "Tower"], "no column is empty in all runs, but the AUC"
    assert found.row("bare")[1:] == ["–"] * 2
    _, alone = page([bare], tmp_path)
    assert "No run has a curves.jsonl" in alone.text and alone.count("svg") == 0


def test_several_labels_and_epochs_have_tables(tmp_path):
    metrics = {
        "click_auc": 0.74,
        "click_auc_standard_error": 0.001,
        "like_auc_standard_error": 0.002,
        "click_ne": 0.88,
        "like_auc": 0.69,
        "like_ne": 0.91,
        "auc_epoch_1": 0.71,
        "auc_epoch_2": 0.74,
    }
    _, found = page([write_run(tmp_path / "run", charts=False, **metrics)], tmp_path)
    assert found.row("run: like")[1] == "0.6900"
    assert found.row("Test AUC after epoch") == ["Test AUC after epoch", "1", "2"]
    assert ["run", "0.7100", "0.7400"] in found.cells


def test_sampled_users_are_mentioned(tmp_path):
    _, found = page([write_run(tmp_path / "run", charts=False, gauc_users_sampled=0.25)], tmp_path)
    assert "sample of 25.000% of the users" in found.text


def test_use_of_tables_is_shown_largest_first_with_what_a_step_asks(tmp_path):
    run = write_run(tmp_path / "one", charts=False)
    numbers = {"rows": 1000, "bytes": 4_000_000, "occupancy": 0.25, "missing": 0.5, "ranks": []}
    tables = {"<b>small</b>": numbers | {"bytes": 4000}, "item": numbers | {"hit_rate": 0.75}}
    older = {"step": 1, "tables": {"gone": numbers}}
    lines = [json.dumps(line) for line in (older, {"step": 2, "tables": tables})]
    (run / "tables.jsonl").write_text("\n".join(lines) + "\n")
    metrics = json.loads((run / "metrics.json").read_text())
    metrics |= {"step_features": 26, "step_lookups": 2, "step_bytes_sent": 123456}
    (run / "metrics.json").write_text(json.dumps(metrics))
    _, found = page([run], tmp_path)
    assert found.text.index("item") < found.text.index("<b>small</b>")
    assert "gone" not in found.text and "No run has a tables.jsonl" not in found.text
    for text in ("25.0%", "75.0%", "50.00%", "4.0", "123,456"):
        assert text in found.text, text


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    runs = [write_run(tmp_path / name / "run", charts=False) for name in "ab"]
    _, found = page(runs, tmp_path)
    assert found.row(str(runs[0])) and found.row(str(runs[1]))


def best_cells(found: Page) -> list[str]:
    """Return the columns that have a marked cell, of the only table that marks any."""
    return [attributes["class"] for _, attributes in found.attributes if "class" in attributes]


@pytest.mark.parametrize(("lead", "marked"), [(0.0032, 0), (0.0034, 2)])
def test_the_best_is_marked_only_beyond_the_interval_of_the_difference(tmp_path, lead, marked):
    """Two errors of 0.0012 make an interval of 0.0033 on either side."""
    for name, auc in (("first", 0.74 + lead), ("second", 0.74)):
        write_run(tmp_path / name, auc, charts=False, ceiling_auc=0.76)
    _, found = page([tmp_path / "second", tmp_path / "first"], tmp_path)
    assert best_cells(found).count("best") == marked
    assert ("No run is called best" in found.text) == (marked == 0)
    assert "of an unpaired difference leaves open, 0.0033" in found.text
    assert "decides: python -m trainer.compare." in found.text


@pytest.mark.parametrize(
    ("user", "reason"),
    [("", "this log has no user column"), ("user_id", "no user of the test rows has both")],
)
def test_a_missing_gauc_is_explained(tmp_path, user, reason):
    bare = write_run(tmp_path / "bare", charts=False)
    (bare / "config.json").write_text(json.dumps({"schema": {"user": user}}))
    _, found = page([bare, write_run(tmp_path / "other", charts=False, gauc=0.6)], tmp_path)
    assert f"GAUC of bare is missing: {reason}" in found.text
    _, found = page([bare], tmp_path)
    assert f"GAUC is missing: {reason}" in found.text


def figures(text: str) -> dict[str, str]:
    """Return the markup of each figure by its title."""
    parts = re.findall(r"<figure><figcaption>(.*?)</figcaption>(.*?)</figure>", text, re.DOTALL)
    return dict(parts)


def ticks(svg: str, axis: str) -> list[float]:
    """Return the numbers written at an axis of a chart."""
    part = svg[svg.index(f"-matplotlib.axis_{1 if axis == 'x' else 2}") :]
    part = part[: part.index("-patch_")] if axis == "y" else part[: part.index("axis_2")]
    found = re.findall(r">([−\d.]+)</text>", part)
    return [float(number.replace("−", "-")) for number in found]


@pytest.mark.parametrize(
    ("taus", "low", "high"),
    [([0.4972, 0.5043], 0.49, 0.512), ([0.503, 0.503], 0.492, 0.514), ([0.3, 0.8], 0.27, 0.83)],
)
def test_the_axis_of_tau_spans_the_values_and_at_least_a_fiftieth(tmp_path, taus, low, high):
    run = write_run(tmp_path / "run", charts=False)
    records = [
        {"step": 9, "layer": layer, "module": "learned", "path": f"layers.{layer}", "tau": tau}
        for layer, tau in enumerate(taus, start=1)
    ]
    (run / "ranks.json").write_text(json.dumps(records))
    text, _ = page([run], tmp_path)
    figure = figures(text)["Softening exponent τ"]
    values = ticks(figure, "y")
    assert low <= min(values) < max(values) <= high
    assert len(values) >= 3 and max(values) - min(values) > 0.6 * max(0.02, max(taus) - min(taus))
    assert "τ = sigmoid(a)" in figure and "starts at 0.5" in figure


@pytest.mark.parametrize("layers", [[1], [0, 1, 2]])
def test_layers_are_whole_numbers(layers):
    axes = Axes(title="ranks", x="layer", y="ferank", whole_x=True)
    points = [(float(layer), 0.5) for layer in layers]
    svg = chart("ranks", axes, [Line(label="run", series=0, points=points)])
    assert ticks(svg, "x") == layers


@pytest.mark.parametrize("has_path", [True, False])
def test_two_modules_of_one_kind_in_a_layer_are_told_apart(tmp_path, has_path):
    run = write_run(tmp_path / "run", charts=False)
    records = [
        {"step": 9, "layer": layer, "module": "ffn", "erank": 8.0, "ferank": ferank}
        | ({"path": f"blocks.{layer - 1}.{path}"} if has_path else {})
        for layer in (1, 2)
        for path, ferank in (("ffn.layers.0", 0.4), ("ffn", 0.8))
    ]
    (run / "ranks.json").write_text(json.dumps(records))
    text, found = page([run, write_run(tmp_path / "other", charts=False)], tmp_path)
    figure = figures(text)["Effective rank share: feed-forward (ffn)"]
    labels = re.findall(r">(run[^<]*)</text>", figure)
    if has_path:
        assert labels == ["run: blocks.*.ffn.layers.0", "run: blocks.*.ffn"]
        assert found.row("ffn 2 (blocks.1.ffn)")[2] == "0.8000"
    else:
        assert labels == ["run: no. 1", "run: no. 2"]


def test_effective_ranks_come_with_their_meaning_and_without_single_rows(tmp_path):
    run = write_run(tmp_path / "run", charts=False)
    row = {"step": 9, "layer": 1, "module": "layer", "erank": 1.0, "ferank": 1.0}
    (run / "ranks.json").write_text(json.dumps([row]))
    text, found = page([run], tmp_path)
    assert not figures(text), "a chart of nothing but 1"
    assert "Outputs of a single row are left out" in found.text
    (run / "ranks.json").write_text(json.dumps([row | {"erank": 4.0, "ferank": 0.5}]))
    text, found = page([run], tmp_path)
    assert list(figures(text)) == ["Effective rank share: layer output"]
    for words in ("ferank = erank / r", "exp(−Σ pᵢ ln pᵢ)", "between 1/r and 1", "full rank"):
        assert words in found.text
    assert "single row" not in found.text


def test_the_input_is_the_first_point_of_the_layers_line(tmp_path):
    run = write_run(tmp_path / "run", charts=False)
    paths = ("inputs", "layers.0", "layers.1")
    records = [
        {"step": 9, "layer": layer, "module": "layer", "path": path, "erank": 4.0, "ferank": 0.5}
        for layer, path in enumerate(paths)
    ]
    (run / "ranks.json").write_text(json.dumps(records))
    text, _ = page([run, write_run(tmp_path / "other", charts=False)], tmp_path)
    assert re.findall(
        r">(run[^<]*)</text>", figures(text)["Effective rank share: layer output"]
    ) == ["run"]


def test_a_chart_of_one_run_among_several_names_it(tmp_path):
    run = write_run(tmp_path / "run", charts=False)
    record = {"step": 9, "layer": 1, "module": "attention", "erank": 4.0, "ferank": 0.5}
    (run / "ranks.json").write_text(json.dumps([record]))
    text, _ = page([write_run(tmp_path / "other", charts=False), run], tmp_path)
    assert ">run</text>" in figures(text)["Effective rank share: attention map"]


def test_charts_are_well_formed_and_small():
    points = [(float(x), 1.0 / (1 + x)) for x in range(20_000)]
    axes = Axes(title="Loss <1>", x="rows", y="loss")
    lines = [Line(label=f"run & {index}", series=index, points=points) for index in range(10)]
    svg = chart("loss", axes, lines)
    root = ElementTree.fromstring(svg)
    assert root.findtext("title") == "Loss <1>: loss over rows"
    assert len(svg) < 200_000
    assert "currentColor" in svg and "var(--series-7)" in svg and "#0" not in svg
    assert chart("empty", axes, [Line(label="run", series=0, points=[])]) == ""


def test_a_chart_of_one_point_or_equal_values_is_drawn():
    axes = Axes(title="AUC", x="step", y="AUC", whole_x=True)
    for points in ([(3.0, 0.5)], [(1.0, 0.0), (2.0, 0.0)]):
        assert "<svg" in chart("auc", axes, [Line(label="run", series=0, points=points)])


@pytest.mark.parametrize(
    ("value", "form", "expected"),
    [
        (0.12345, ".4f", "0.1235"),
        (None, ".4f", "–"),
        (float("nan"), ".4f", "–"),
        (1234567, ".4f", "1,234,567"),
        ([0.5, None], ".2f", "0.50, –"),
        ("text", ".4f", "text"),
        (True, ".4f", "True"),
    ],
)
def test_values_are_written_for_reading(value, form, expected):
    assert written(value, form) == expected


def test_the_command_writes_the_page_and_refuses_what_is_no_run(tmp_path, capsys):
    run = write_run(tmp_path / "run", charts=False)
    output = tmp_path / "report.html"
    assert main([str(run), "--output", str(output)]) == 0
    assert output.exists() and capsys.readouterr().out.strip() == str(output)
    assert main([str(tmp_path / "nowhere"), "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert "nowhere: expected the folder of a run, with config.json, metrics.json or" in error
    assert f"got nothing of that name; runs are in {run}" in error
    assert main([str(run), "--output", str(tmp_path)]) == 2
    assert f"got a folder; pass --output {output}" in capsys.readouterr().err
    with pytest.raises(ValueError, match="at least one run"):
        report([], output)


@pytest.mark.parametrize(
    ("files", "got"),
    [
        ((), "got an empty folder; pass what trainer.train was given as --output"),
        (("thesis.txt", "logs/a.csv"), "got a folder with logs/, thesis.txt; pass what trainer"),
        (("a.demo/metrics.json", "logs/a.csv"), "got a folder with a.demo/, logs/; runs are in "),
        (
            ("nights/2026-01-01/a", "nights/2026-01-02/a"),
            "got a folder with nights/; each night has a page of its own, the last ",
        ),
        (tuple("123456789"), "got a folder with 1, 2, 3, 4, 5 and 4 more; pass"),
    ],
)
def test_a_folder_that_is_no_run_is_told_by_what_it_holds(tmp_path, files, got):
    place = tmp_path / "place"
    place.mkdir()
    for name in files:
        (place / name).parent.mkdir(exist_ok=True, parents=True)
        (place / name).write_text("{}")
    with pytest.raises(ValueError, match=re.escape(got)) as raised:
        report([place], tmp_path / "report.html")
    if "runs are in" in got:
        assert str(raised.value).endswith(str(place / "a.demo"))
    if "nights" in got:
        assert str(raised.value).endswith(str(place / "nights/2026-01-02"))


def test_a_file_is_no_run(tmp_path):
    run = write_run(tmp_path / "run", charts=False)
    with pytest.raises(ValueError, match=r"got a file; pass what trainer\.train was given"):
        report([run / "metrics.json"], tmp_path / "report.html")


def test_a_password_in_an_address_is_not_shown(tmp_path):
    run = write_run(tmp_path / "run", charts=False)
    address = "https://me:s3cret@push:9091/x?token=s3cret"
    config = {"export": {"push_url": address}, "data": {"path": "s3://key:s3cret@logs"}}
    (run / "config.json").write_text(json.dumps(config))
    text, _ = page([run], tmp_path)
    assert "s3cret" not in text and "https://push:9091/x" in text


def test_a_run_with_early_stopping_says_which_checkpoint_was_tested_and_shows_its_validations(
    tmp_path,
):
    stopping = {"metric": "auc", "best_step": 8, "best_value": 0.625, "validations": 4}
    run = write_run(tmp_path / "run", early_stopping={**stopping, "stopped_early": True})
    records = [{"step": step, "auc": 0.6, "split": "validation"} for step in (4, 8, 12, 16)]
    lines = [json.dumps(one) for one in [*records, {"step": 16, "auc": 0.61}]]
    (run / "evaluations.jsonl").write_text("\n".join(lines) + "\n")
    _, found = page([run], tmp_path)
    assert "run ended early, at step" in found.text
    assert "best checkpoint, of step 8 (validation auc 0.6250), of 4 validations." in found.text
    assert "Validation AUC" in found.text and "Test AUC" not in found.text
    (run / "metrics.json").write_text(
        json.dumps({"early_stopping": {"best_step": [1], "metric": 7}})
    )
    page([run], tmp_path)


def test_runs_are_sorted_by_auc_with_the_verdict_first_and_one_table_of_settings_that_differ(
    tmp_path,
):
    runs = [write_run(tmp_path / name, auc) for name, auc in [("low", 0.70), ("high", 0.74)]]
    runs.append(write_run(tmp_path / "same", 0.72))
    config = json.loads((runs[0] / "config.json").read_text())
    for run, rate, tower in zip(runs, (0.1, 0.2, 0.2), ("A", "B", "B"), strict=True):
        own = {"dense": {"learning_rate": rate, "eps": 1e-8}, "model": {"tower": {tower: 1}}}
        (run / "config.json").write_text(json.dumps(config | own))
    text, found = page(runs, tmp_path)
    assert text.index("Best by AUC: high") < text.index("One row a run")
    names = [run for run in re.findall(r'<th scope="row">(\w+)</th>', text)][:3]
    assert names == ["high", "same", "low"]
    assert found.row("dense.learning_rate") == ["dense.learning_rate", "0.2", "0.2", "0.1"]
    assert found.row("model.tower.A") == ["model.tower.A", "null", "null", "1"]
    assert "dense.eps" not in re.sub("<pre>.*?</pre>", "", text, flags=re.DOTALL)
