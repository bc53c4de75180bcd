# SPDX-License-Identifier: Apache-2.0
"""The recipes that ship: their rows as the CSV files have them, their names, the arithmetic of their budgets."""

import csv
from decimal import Decimal
from importlib.resources import files

import pytest

from mindvl_data import DataError
from mindvl_data.recipes import list_recipes, load_recipe

FILES = {
    "warmup": ["warmup.csv"],
    "multitask": [
        "multitask_interleaved.csv",
        "multitask_visual_instruction.csv",
        "multitask_web2code.csv",
        "multitask_text_instruction.csv",
    ],
    "sft": ["sft.csv"],
}


def _rows(name):
    rows = []
    for file in FILES[name]:
        with (files("mindvl_data.recipes") / file).open(encoding="utf-8", newline="") as text:
            rows += list(csv.DictReader(text))
    return rows


def test_the_recipes_are_the_three_phases():
    assert list_recipes() == ("warmup", "multitask", "sft")


@pytest.mark.parametrize(("name", "rows"), [("warmup", 37), ("multitask", 8 + 313 + 1 + 6), ("sft", 143)])
def test_every_row_of_the_files_is_a_source_with_the_figures_as_printed(name, rows):
    recipe = load_recipe(name)
    assert len(recipe.sources) == rows
    loaded = [(s.name, s.category, s.samples, None if s.percent is None else str(s.percent)) for s in recipe.sources]
    expected = [
        (row["name"], row["category"], int(row["samples"]) if row["samples"] else None, row["percent"] or None)
        for row in _rows(name)
    ]
    assert loaded == expected


def test_a_printed_zero_at_the_end_is_kept_because_it_is_a_digit():
    by_name = {source.name: source for source in load_recipe("sft").sources}
    assert str(by_name["QwenQA/PixMo/Cap-QA"].percent) == "3.9990"


def test_a_recipe_that_is_not_there_is_named_with_the_nearest():
    with pytest.raises(DataError, match=r"warm-up: unknown data mixture.*nearest is 'warmup'"):
        load_recipe("warm-up")


def test_directory_names_are_plain_and_each_belongs_to_one_source():
    for name in list_recipes():
        directories = [source.directory for source in load_recipe(name).sources]
        assert len(set(directories)) == len(directories)
        assert all(directory.replace("-", "").isalnum() and directory == directory.lower() for directory in directories)
    by_name = {source.name: source.directory for source in load_recipe("multitask").sources}
    assert by_name["M4-Instruct/3D-LLM-3-datasets"] == "m4-instruct-3d-llm-3-datasets"
    assert by_name["General QA"] == "general-qa"


def test_the_budget_of_a_phase_becomes_steps_and_tokens_of_a_sample():
    sft = load_recipe("sft")
    (budget, _) = sft.budgets
    assert budget.tokens == Decimal(12_000_000_000)
    # 2048 x 512 = 1,048,576 tokens in a step; 12e9 / 1,048,576 = 11,444.09
    assert [sft.steps(budget, length) for length in (2048, 4096, 8192)] == [11444, 5722, 2861]
    assert sft.tokens_per_sample(budget) == pytest.approx(12e9 / 6_210_645)


def test_tokens_of_a_sample_are_left_open_where_a_count_is_unknown_or_only_a_part_is_seen():
    multitask = load_recipe("multitask")
    whole, _, visual = multitask.budgets
    assert multitask.tokens_per_sample(whole) is None  # Web2Code has no count
    assert multitask.tokens_per_sample(visual) == pytest.approx(80e9 / 38_140_772)
    warmup = load_recipe("warmup")
    assert warmup.tokens_per_sample(warmup.budgets[1]) is None  # 16 B tokens sampled from all of it
