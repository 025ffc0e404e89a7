# SPDX-License-Identifier: MIT
"""What a command line may say of a recipe, and what it is told when it says something else."""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Literal

import pytest

from trainer import train
from trainer.config.command_line import apply_overrides
from trainer.config.overrides import check_words, describe_settings, setting_kinds, setting_names
from trainer.recipes.load import load_recipe, recipes

SCREEN = 45  # lines


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of each kind."""

    kind: Literal["big", "small"] = "big"
    sizes: tuple[int, ...] = (1, 2)
    kinds: tuple[Literal["big", "small"], ...] = ("big",)
    rates: dict[str, float] = field(default_factory=lambda: {"item": 0.5})
    fast: bool = False


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A section in a section."""

    recipe: str = "not a setting"
    rows: int = 1_000
    rate: float = 0.1
    path: str = ""
    part: Part = field(default_factory=Part)


@pytest.mark.parametrize(
    "words",
    [
        "--rows 3 --rate 1e-3 --path x",
        "--rows=-3 --rate nan --path=",
        "--rows -3 --part.sizes 1 2 3 --part.sizes --part.kinds small big",
        "--part.rates user 0.1 item 2 --part.rates",
        "--part.fast --part.no-fast --part.kind small",
        "",
    ],
)
def test_words_that_fit_pass(words):
    check_words(setting_kinds(Whole()), words.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rows many", "--rows: expected an integer, got 'many'"),
        ("--rows 1.5", "--rows: expected an integer, got '1.5'"),
        ("--rows", "--rows: expected an integer, got nothing"),
        ("--rows 1 2", "--rows: expected an integer, got 1 2"),
        ("--rate fast", "--rate: expected a number, got 'fast'"),
        ("--path a b", "--path: expected one word (quote spaces), got a b"),
        (
            "--part.kind bigg",
            "--part.kind: expected one of 'big', 'small', got 'bigg', did you mean 'big'?",
        ),
        (
            "--part.sizes 1 x",
            "--part.sizes: expected any number of words, each an integer, got 'x'",
        ),
        (
            "--part.kinds big smal",
            "--part.kinds: expected any number of words, each one of 'big', 'small', got 'smal', "
            "did you mean 'small'?",
        ),
        (
            "--part.rates user",
            "--part.rates: expected pairs NAME VALUE, each VALUE a number, got 'user'",
        ),
        (
            "--part.rates user low",
            "--part.rates: expected pairs NAME VALUE, each VALUE a number, got 'low'",
        ),
        ("--part.rates a 1 b 2 a 3", "--part.rates: expected each NAME once, got 'a' twice"),
        (
            "--part.fast yes",
            "--part.fast: expected no value (--x.y for on, --x.no-y for off), got 'yes'",
        ),
    ],
)
def test_a_word_that_does_not_fit_is_told_with_what_was_expected_and_meant(words, message):
    with pytest.raises(ValueError) as caught:
        check_words(setting_kinds(Whole()), words.split())
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--row 1", "unknown setting --row, did you mean '--rows'?; `python"),
        (
            "--dense.gradient-accumulation-steps 2",
            "--dense.gradient-accumulation-steps: gradients are not accumulated over batches",
        ),
        ("--part.size 1", "unknown setting --part.size, did you mean '--part.sizes'?; `python"),
        ("--no-rows", "unknown setting --no-rows, did you mean '--rows'?; `python"),
        ("--recipe x", "unknown setting --recipe"),
        ("rows 3", "unexpected word 'rows': expected --section.field VALUE; `python"),
        ("-rows 3", "unexpected word '-rows': expected --section.field VALUE; `python"),
    ],
)
def test_a_setting_that_does_not_exist_is_told_with_the_closest(words, message):
    with pytest.raises(ValueError) as caught:
        check_words(setting_kinds(Whole()), words.split())
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--runtime.seed -1", "runtime.seed: expected an integer from 0 to 4294967295, got -1"),
        ("--epochs 0", "epochs must be at least 1 and max_steps not negative, got 0 and 0"),
        ("--sparse.learning-rate -1", "sparse.learning_rate: expected a number > 0, got -1.0"),
        (
            "--parallel.sharding.sharding-types",
            "parallel.sharding.sharding_types: expected at least one kind, got none",
        ),
        ("--checkpoint.keep 0", "checkpoint: interval_steps must not be negative and keep must"),
        ("--data.test-days tomorrow", "data.test_days: expected FIRST:LAST or DAY with days as"),
    ],
)
def test_a_value_that_a_section_refuses_is_told_in_the_sections_words(words, message):
    with pytest.raises(ValueError) as caught:
        apply_overrides(load_recipe("dlrm.demo"), words.split())
    assert str(caught.value).startswith(message)
    assert "helptext" not in str(caught.value)


def test_settings_are_listed_with_their_values_a_setting_a_line_at_most():
    text = describe_settings(Whole())
    assert text.splitlines() == [
        "A section in a section.",
        "  --rows 1000  --rate 0.1  --path ''",
        "One of each kind.",
        "  --part.kind big  --part.sizes 1 2  --part.kinds big  --part.rates item 0.5  "
        "--part.fast (off)",
    ]
    assert setting_names(Whole())[-1] == "--part.fast"


@pytest.mark.parametrize("name", sorted(recipes()))
def test_the_help_of_a_recipe_and_of_each_section_is_a_screen_and_together_complete(name, capsys):
    assert train.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    listed = re.findall(r"^  ([a-z][a-z_.-]*)  +\S", text, re.MULTILINE)
    pages = [text]
    for section in listed:
        assert train.main([name, "--help", section]) == 0
        pages.append(capsys.readouterr().out)
    for page in pages:
        assert len(page.splitlines()) <= SCREEN
        assert max(map(len, page.splitlines())) <= 120
    whole = " ".join(pages[1:]) + " "
    names = setting_names(load_recipe(name))
    assert not [word for word in names if f"{word} " not in whole]
    assert len([word for word in names if f"{word} " in text]) >= 16
    assert "data.path" in text and "learning-rate" in text


def test_help_of_a_section_describes_it_and_those_within_and_another_is_named(capsys):
    assert train.main(["dlrm.demo", "--help", "data", "parallel", "--output", "x"]) == 0
    text = capsys.readouterr().out
    assert "test_days: inclusive ranges" in text and "--data.path ''" in text
    assert "Within it: parallel.sharding, parallel.zero" in text
    assert train.main(["dlrm.demo", "--help", "model"]) == 0
    assert "model.tokenizer.projection: Projection of fields" in capsys.readouterr().out
    assert train.main(["dlrm.demo", "--help", "lader"]) == 2
    error = capsys.readouterr().err
    assert "--help lader: expected a section, one of run, data" in error
    assert error.strip().endswith("did you mean 'loader'?")


def test_the_long_help_describes_what_the_short_one_lists(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["dlrm.demo", "--help-all"])
    assert not stop.value.code
    text = capsys.readouterr().out
    assert "examples per rank and step" in text
    assert "--loader.batch-size" in text


@pytest.mark.parametrize("name", ["dlrm.demo", "dlrm.globo"])  # globo has a mapping with a pair
def test_settings_can_be_replaced_by_their_own_written_values(name):
    config = load_recipe(name)
    words = [
        word
        for line in describe_settings(config).splitlines()
        if line.startswith("  ") and "(o" not in line and "()" not in line and "''" not in line
        for word in line.split()
    ]
    assert len(words) > 40
    assert apply_overrides(config, words) == dataclasses.replace(config)


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        (["--sparse.table-learning-rates", "article", "0.5"], {"article": 0.5}),
        (["--sparse.table_learning_rates", "user", "0.5"], {"user": 0.5}),
        (["--sparse.table-learning-rates"], {}),
        (["--sparse.learning-rate", "0.5"], {"user": 0.01}),
    ],
)
def test_a_mapping_that_a_recipe_fills_is_given_anew_as_a_whole(words, rates):
    config = load_recipe("dlrm.globo")
    assert config.sparse.table_learning_rates == {"user": 0.01}
    assert apply_overrides(config, words).sparse.table_learning_rates == rates


def test_no_overrides_change_nothing():
    config = load_recipe("dlrm.demo")
    assert apply_overrides(config, []) == config


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ([], (0, 512)),
        (["--loader.batch-size", "64"], (64, 0)),
        (["--loader.batch-size=64"], (64, 0)),
        (["--loader.global-batch-size", "96"], (0, 96)),
        (["--loader.batch-size", "0", "--loader.global-batch-size", "96"], (0, 96)),
    ],
)
def test_a_batch_is_given_for_a_rank_or_for_all_ranks(words, sizes):
    loader = apply_overrides(load_recipe("dlrm.demo"), words).loader
    assert (loader.batch_size, loader.global_batch_size) == sizes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--loader.batch-size", "64", "--loader.global-batch-size", "96"], "expected one of them"),
        (["--loader.batch-size", "0", "--loader.global-batch-size", "0"], "got 0 for both"),
        (["--loader.batch-size", "-1"], "at least 0, got -1"),
        (["--loader.global-batch-size", "-1"], "at least 0, got -1"),
    ],
)
def test_sizes_of_batches_that_mean_nothing_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        apply_overrides(load_recipe("dlrm.demo"), words)
