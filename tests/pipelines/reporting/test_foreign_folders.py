# SPDX-License-Identifier: MIT
"""A report of a folder that somebody else wrote runs nothing, ends, and misleads nobody."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import report
from pipelines.reporting import run_data, svg_charts
from pipelines.reporting.comparison import comparison_table
from pipelines.reporting.run_data import CHANGES, read_run
from pipelines.reporting.svg_charts import Axes, Line, chart
from tests.support.report_pages import Page, page, write_run

FILES = ("config.json", "metrics.json", "evaluation.json", "ranks.json", CHANGES)
LINES = ("curves.jsonl", "evaluations.jsonl", "tables.jsonl")


def made(folder: Path, tmp_path: Path) -> Page:
    """The page of a folder, which is made whatever lies in it."""
    output = tmp_path / "page.html"
    assert report.main([str(folder), "--output", str(output)]) == 0
    return Page(output.read_text(encoding="utf-8"))


BOMB = """
import pathlib
pathlib.Path({place!r}).write_text("imported")
def feed():
    pathlib.Path({place!r}).write_text("called")
"""


def test_nothing_that_a_folder_names_is_imported_and_no_torch_is_needed(tmp_path):
    """In a process of its own, with a module on its path that every place of the folder names."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/bomb.py").write_text(BOMB.format(place=str(tmp_path / "exploded")))
    names = ["bomb:feed", "bomb.feed", "bomb", "trainer.recipes.bomb:feed"]
    folders = []
    for number, name in enumerate(names):
        run = write_run(tmp_path / f"run-{number}")
        tower = {"type": name, "name": name, "module": name, "factory": name}
        config = {"recipe": name, "model": {"tower": tower}, "type": name, "data": {"path": name}}
        config |= {"inherit": {"path": name}, "plugins": [name], "!!python/object/apply": name}
        (run / "config.json").write_text(json.dumps(config))
        (run / CHANGES).write_text(json.dumps({"recipe": name, "settings": [{"setting": name}]}))
        (run / "evaluation.json").write_text(json.dumps({"type": name, "recipe": name}))
        folders.append(str(run))
    night = tmp_path / "night"
    for stage in ("days", "candidate", "verdict"):
        (night / stage).mkdir(parents=True)
        manifest = {"metrics": {"recipe": names[0], "summary": names[0]}, "stage": names[0]}
        (night / stage / "manifest.json").write_text(json.dumps(manifest))
    code = (
        "import sys; from pipelines.report import main\n"
        "heavy = {'torch', 'torchrec', 'pyarrow', 'fbgemm_gpu', 'deepspeed'}\n"
        "assert not heavy & sys.modules.keys() and 'matplotlib' not in sys.modules\n"
        "assert main(sys.argv[3:] + ['--output', sys.argv[1]]) == 0\n"
        "assert main([sys.argv[2], '--output', sys.argv[1]]) == 0\n"
        "print(sorted(heavy & sys.modules.keys()), 'bomb' in sys.modules)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "page.html"), str(night), *folders]
    root = Path(report.__file__).parents[1]
    path = os.pathsep.join([str(root), str(tmp_path / "code")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] False"
    assert not (tmp_path / "exploded").exists()


DAMAGE = {
    "empty": b"",
    "cut short": b'{"auc": 0.7, "a": [1, 2',
    "no UTF-8": b'{"auc": "\xff\xfe"}',
    "a number": b"7",
    "a text": b'"text"',
    "null": b"null",
    "an empty list": b"[]",
    "a list of anything": b'[1, "a", null, [2], {"step": "x", "tables": 3, "alerts": {}}]',
    "not a number": b'{"auc": NaN, "rows": Infinity, "label_mean": -Infinity}',
    "huge numbers": b'{"auc": 1e400, "rows": 1' + b"0" * 4000 + b', "label_mean": 1e308}',
    "too many digits": b'{"auc": ' + b"9" * 10_000 + b"}",
    "deep lists": b"[" * 100_000,
    "deep mappings": b'{"a": ' * 5_000 + b"1" + b"}" * 5_000,
    "as deep as a parser goes": b"[" * 900 + b"]" * 900,
    "a lone surrogate": b'{"recipe": "\\ud800", "alerts": ["\\udfff"]}',
    "control characters": b'{"recipe": "\\u0000\\u001b[2J\\n", "alerts": ["\\u0007"]}',
    "zero bytes": bytes(1000),
}


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_a_run_whose_every_file_is_damaged_has_a_page(content, tmp_path, capsys):
    run = write_run(tmp_path / "run", charts=False)
    for name in (*FILES, *LINES):
        (run / name).write_bytes(content + (b"\n" if name in LINES else b""))
    found = made(run, tmp_path)
    assert "FullRank report: run" in found.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f]", found.text)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", [*FILES, *LINES])
@pytest.mark.parametrize("kind", ["cut short", "a list of anything"])
def test_a_damaged_file_leaves_the_rest_of_the_page(name, kind, tmp_path):
    run = write_run(tmp_path / "run", charts=False)
    (run / name).write_bytes(DAMAGE[kind] + (b"\n" if name in LINES else b""))
    found = made(run, tmp_path)
    if name != "metrics.json":
        assert found.row("run")[1] == "0.7400"


WRONG = [3, -1, 0, "text", None, True, [], {}, [[]], {"a": {"b": []}}, [{"step": []}], 1e29, ""]
KEYS = {
    "metrics.json": "auc auc_standard_error rows label_mean ceiling_auc gauc alerts step_lookups "
    "nonfinite_predictions auc_epoch_1 gauc_users_sampled x_auc_standard_error world_size",
    "config.json": "model data schema recipe",
    "evaluation.json": "intervals reliability user_activity labels phase_seconds sampled_steps",
    CHANGES: "settings",
}
SOUND = {
    "evaluation.json": {
        "intervals": {"auc": [0.7, 0.8]},
        "reliability": {"ece": 0.1, "bins": [{"low": 0.0, "high": 1.0, "prediction": 0.1}]},
        "user_activity": [{"from_rows": 1, "to_rows": 2, "users": 3}],
        "phase_seconds": {"forward": 0.1},
        "sampled_steps": 3,
    },
    CHANGES: {"settings": [{"setting": "a", "recipe": 1, "run": 2}]},
}


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, keys in KEYS.items() for key in keys.split()]
)
def test_values_of_a_wrong_type_are_passed_over(name, key, tmp_path, monkeypatch):
    """No section falls back to its empty form: each passes over what it cannot use."""
    monkeypatch.setattr(report, "_DAMAGE", ())
    run, other = write_run(tmp_path / "run", charts=False), tmp_path / "other"
    write_run(other, charts=False)
    sound = SOUND.get(name) or json.loads((run / name).read_text())
    for value in WRONG:
        (run / name).write_text(json.dumps({**sound, key: value}))
        report.report([run, other], tmp_path / "page.html")
        comparison_table([run, other])


@pytest.mark.parametrize("name", ["ranks.json", "curves.jsonl", "tables.jsonl"])
def test_records_of_wrong_values_are_passed_over(name, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_DAMAGE", ())
    run = write_run(tmp_path / "run", charts=False)
    keys = "step layer module path ferank spectrum tau erank mutual_information label_entropy"
    keys += " alerts rows loss auc tables"
    modules = ("layer", "attention", "gradient", "clusters")
    records = [
        {"step": 1, "layer": 0, "module": module, "ferank": 0.5, "spectrum": [0.5, 1.0], key: value}
        for key in keys.split()
        for value in WRONG
        for module in modules
    ]
    for one in [records, [{"step": 1, "tables": {"a": value}} for value in WRONG]]:
        lines = "".join(f"{json.dumps(record)}\n" for record in one)
        (run / name).write_text(json.dumps(one) if name == "ranks.json" else lines)
        report.report([run], tmp_path / "page.html")


def test_a_section_that_cannot_be_made_is_named_with_its_file(tmp_path, monkeypatch):
    def broken(runs):
        raise ZeroDivisionError("<b>by nothing</b>")

    sections = [
        report.Section(name=one.name, file=one.file, make=broken, empty=one.empty)
        for one in report.SECTIONS
    ]
    monkeypatch.setattr(report, "SECTIONS", sections)
    found = made(write_run(tmp_path / "run", charts=False), tmp_path)
    for one in sections:
        assert f"{one.file}: cannot be shown as {one.name} (ZeroDivisionError: <b>" in found.text


@pytest.mark.parametrize("name", [*FILES, *LINES])
def test_a_file_that_is_too_large_is_refused_before_it_is_read(name, tmp_path):
    run = write_run(tmp_path / "run", charts=False)
    with (run / name).open("wb") as file:
        file.truncate(2 << 30)  # takes no room on the disk
    assert f"{name} cannot be read (larger than" in made(run, tmp_path).text


@pytest.mark.parametrize("name", [*FILES, *LINES])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop"])
def test_what_is_no_plain_file_neither_hangs_nor_fills_the_memory(name, kind, tmp_path):
    run, path = write_run(tmp_path / "run", charts=False), tmp_path / "run" / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    assert f"{name} cannot be read" in made(run, tmp_path).text


def test_of_a_long_file_of_lines_evenly_chosen_ones_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(run_data, "_MAX_LINES", 100)
    run = write_run(tmp_path / "run", charts=False)
    lines = [json.dumps({"step": step}) for step in range(1000)]
    lines[500] = "{"
    (run / "curves.jsonl").write_text("\n".join(lines) + '\n{"step": 10')
    found = read_run(run, "run")
    assert [one["step"] for one in found.curve[:3]] == [0, 10, 20]
    assert found.curve[-1] == {"step": 999} and len(found.curve) == 100
    assert [note.partition(" (")[0] for note in found.notes] == [
        "curves.jsonl cannot be read in 1 lines",
        "curves.jsonl is long: one of 10 lines is shown",
    ]


def test_a_folder_of_very_many_things_makes_a_page_of_bounded_size(tmp_path):
    run = write_run(tmp_path / "run", charts=False)
    labels = {f"label-{n}_auc_standard_error": 0.1 for n in range(5000)}
    metrics = {**json.loads((run / "metrics.json").read_text()), **labels}
    metrics |= {"alerts": [f"alert-{n}" for n in range(5000)]}
    metrics |= {f"auc_epoch_{n}": 0.5 for n in range(5000)}
    (run / "metrics.json").write_text(json.dumps(metrics))
    one = {"step": 1, "layer": 0, "module": "layer", "ferank": 0.5}
    ranks = [{**one, "path": f"{'x' * 1000}{n}", f"key-{n}": n} for n in range(5000)]
    (run / "ranks.json").write_text(json.dumps(ranks))
    parts = {f"{n}": {"intervals": {"auc": [0.1, 0.2]}} for n in range(5000)}
    (run / "evaluation.json").write_text(json.dumps({"labels": parts}))
    made(run, tmp_path)
    assert (tmp_path / "page.html").stat().st_size < 5 << 20


@pytest.mark.parametrize("name", ["$$", "$x$", "$\\frac{", "_mine", "__", "a$b", "\\", "%s", "{}"])
def test_a_name_stands_in_the_legend_as_it_is(name):
    lines = [
        Line(label=label, series=index, points=[(0.0, 1.0), (1.0, 2.0)])
        for index, label in enumerate((name, "other"))
    ]
    svg = chart("c", Axes(title="t", x="x", y="y"), lines)
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert name in shown and "other" in shown


@pytest.mark.parametrize("name", ["日本", "<b>&amp;</b>", "a\nb\x1b[2J", "\udcff", "x" * 10_000])
def test_any_name_can_be_drawn(name):
    lines = [Line(label=name, series=index, points=[(0.0, 1.0)]) for index in range(100)]
    svg = chart("c", Axes(title=name[:50], x="x", y="y"), lines)
    assert "<b>" not in svg and "\x1b" not in svg and svg.count("<text") < 100
    assert svg_charts._MAX_LINES == 32


@pytest.mark.parametrize(
    "name",
    [
        "a\nalert: forged",
        "\x1b[2J\x1b]0;t\x07",
        "\u202egnp.exe",
        b"\xff\xfe".decode("utf-8", "surrogateescape"),
    ],
)
def test_names_of_folders_forge_no_line_and_steer_no_terminal(name, tmp_path, capsys):
    run, other = write_run(tmp_path / name, charts=False), write_run(tmp_path / "b", charts=False)
    output = tmp_path / "page.html"
    assert report.main([str(run), str(other), "--output", str(output)]) == 0
    Page(output.read_text(encoding="utf-8"))
    table = comparison_table([run, other])
    for path in (run / "absent", tmp_path):  # the second lists the names of runs that are near
        assert report.main([str(path), "--output", str(output)]) == 2
    out, err = capsys.readouterr()
    for text in (table, out, err):
        assert all(line.isprintable() for line in text.splitlines())
        assert not any(line.startswith("alert") for line in text.splitlines())
        text.encode()
    assert len(err.splitlines()) == 2


def test_a_planted_link_in_the_place_of_the_page_is_replaced(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    output = tmp_path / "page.html"
    for planted in (output, tmp_path / ".page.html.partial"):
        planted.symlink_to(victim)
    report.report([write_run(tmp_path / "run", charts=False)], output)
    assert victim.read_text() == "as it was" and not output.is_symlink()


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_stage_of_a_night_is_named_or_passed_over(content, tmp_path, capsys):
    night = tmp_path / "2026-01-03"
    (night / "days").mkdir(parents=True)
    (night / "days/manifest.json").write_text('{"metrics": {"rows": {"2026-01-01": 5}}}')
    (night / "evaluation").mkdir()
    (night / "evaluation/manifest.json").write_bytes(content)
    code = report.main([str(night), "--output", str(tmp_path / "page.html")])
    err = capsys.readouterr().err
    assert code == 0 or (code == 2 and "evaluation/manifest.json: cannot be read" in err)
    assert len(err.splitlines()) == (1 if code else 0)


@pytest.mark.parametrize("value", WRONG)
def test_wrong_values_in_a_night_are_passed_over(value, tmp_path):
    night = tmp_path / "2026-01-03"
    found = {"rows": value, "new": value, "models": value, "differences": value, "date": value}
    found |= {"promote": value, "reasons": value, "summary": value}
    one = {"auc": value, "interval": value, "difference": value}
    for metrics in (value, found, {**found, "models": [one], "differences": {"auc": one}}):
        for stage in ("days", "evaluation", "verdict", "publication"):
            (night / stage).mkdir(parents=True, exist_ok=True)
            manifest = {"metrics": metrics, "started": value, "seconds": value}
            (night / stage / "manifest.json").write_text(json.dumps(manifest))
        _, shown = page([night], tmp_path)
        assert "Promoted" not in shown.text or value is True
