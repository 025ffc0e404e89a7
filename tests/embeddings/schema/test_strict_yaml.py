# SPDX-License-Identifier: MIT
"""YAML without surprises: what is repeated, endless or unreadable is an error with its line."""

import time

import pytest

from embeddings.schema.schema import load_schema
from embeddings.schema.strict_yaml import load_yaml, parse_yaml

SCHEMA = """tables:
  - {name: a, num_embeddings: 10, embedding_dim: 4}
sparse:
  - {name: a, table: a}
labels:
  - {name: y}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SCHEMA + "sparse:\n  - {name: a, table: a}\n", "line 7: key 'sparse' is .* in line 3"),
        (SCHEMA + "labels: []\n", "line 7: key 'labels' is already given in line 5"),
        (
            SCHEMA.replace("{name: y}", "{name: y, column: b, column: c}"),
            "line 6: key 'column' is already given in line 6",
        ),
        (SCHEMA + "dense:\n  - name: a\n    transform: log1p\n    transform: none\n", "line 10"),
        (SCHEMA.replace("name: a, table", '"name": b, name: a, table'), "line 4: key 'name'"),
    ],
)
def test_a_repeated_key_is_named_with_both_lines(tmp_path, text, message):
    (tmp_path / "s.yaml").write_text(SCHEMA)
    load_schema(tmp_path / "s.yaml")
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"s\.yaml, {message}"):
        load_schema(tmp_path / "s.yaml")


def test_the_same_key_in_two_mappings_and_an_overridden_merge_are_fine():
    assert parse_yaml("[{a: 1}, {a: 2}]", "x") == [{"a": 1}, {"a": 2}]
    text = "base: &b {a: 1, c: 3}\nother: {<<: *b, a: 2}"
    assert parse_yaml(text, "x")["other"] == {"a": 2, "c": 3}


def bomb(width, depth):
    """Return lists that name the list before `width` times."""
    lines = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    for i in range(1, depth):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb(9, 9), "aliases .* expanded"),
        (bomb(2, 40), "aliases .* expanded"),
        ("tables: " + bomb(9, 12).replace("\n", "\n "), "x"),
        ("a: &a [*a]", "an alias inside itself"),
        ("a: &a {b: {c: *a}}", "an alias inside itself"),
        ("[" * 100_000, "at most 50 levels|exceeded maximum nesting depth"),
        ("a: " + "{a: " * 1_000 + "1", "at most 50 levels|not valid YAML"),
        ("- " * 100_000, "at most 50 levels"),
        ("a: 2026-02-30", "write it in quotes"),
        ("a: " + "9" * 5_000, "write it in quotes"),
        ("a: *b", "not valid YAML"),
        ("a: [1,", "not valid YAML"),
        ("a: 1\n---\na: 2", "not valid YAML"),
        ("{[1]: 2, [1]: 3}", "not valid YAML"),
        ("!!python/object/apply:os.system [exit]", "not valid YAML"),
    ],
)
def test_what_costs_too_much_or_is_no_data_is_one_short_line_at_once(text, message):
    started = time.monotonic()
    with pytest.raises(ValueError, match=message) as error:
        parse_yaml(text, "x")
    assert time.monotonic() - started < 2
    assert str(error.value).startswith("x") and len(str(error.value)) < 500
    assert "\n" not in str(error.value)


def test_a_file_that_is_too_large_or_no_text_is_named(tmp_path):
    (tmp_path / "s.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"s\.yaml: expected YAML in UTF-8"):
        load_yaml(tmp_path / "s.yaml")
    with pytest.raises(ValueError, match=r"gone\.yaml: .*cannot read"):
        load_yaml(tmp_path / "gone.yaml")
    with pytest.raises(ValueError, match="at most 4,194,304 bytes"):
        load_yaml("/dev/zero")


@pytest.mark.parametrize("name", ["no", "on", "1.10", "2026-01-01", "~", "0x1F", "1e3", "12:30"])
def test_a_name_that_yaml_reads_as_something_else_asks_for_quotes(tmp_path, name):
    (tmp_path / "s.yaml").write_text(SCHEMA.replace("{name: y}", f"{{name: {name}}}"))
    try:
        assert load_schema(tmp_path / "s.yaml").labels[0].name == name  # YAML has it as text
    except ValueError as error:
        assert "write it in quotes" in str(error)
    (tmp_path / "s.yaml").write_text(SCHEMA.replace("{name: y}", f'{{name: "{name}"}}'))
    assert load_schema(tmp_path / "s.yaml").labels[0].name == name
