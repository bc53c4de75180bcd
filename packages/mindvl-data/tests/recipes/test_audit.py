# SPDX-License-Identifier: Apache-2.0
"""The audit: what it finds in the paper, beside an independent count, and in tables that were tampered with."""

import csv
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from importlib.resources import files

import pytest

from mindvl_data.recipes import (
    Recipe,
    RecipeSource,
    RecipeTable,
    Statement,
    Subtotal,
    audit,
    list_recipes,
    load_recipe,
    recompute,
    recompute_tokens,
)


def _rows(file):
    with (files("mindvl_data.recipes") / file).open(encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def _found(recipe):
    return {finding.what: (finding.printed, finding.recomputed) for finding in audit(recipe)}


def _table(*rows, total="10", percent="100.0", **others):
    sources = tuple(
        RecipeSource(name=name, category="A", samples=samples, percent=Decimal(share)) for name, samples, share in rows
    )
    return RecipeTable(where="Table 1", sources=sources, total=Decimal(total), percent=Decimal(percent), **others)


def _recipe(*tables, **others):
    return Recipe(name="made", title="", where="", tables=tables, budgets=(), seq_lengths=(8,), batch_size=1, **others)


def test_the_warm_up_total_and_two_subtotals_do_not_match_their_rows():
    rows = _rows("warmup.csv")
    total = sum(int(row["samples"]) for row in rows)
    caption = sum(int(row["samples"]) for row in rows if row["category"] == "Caption")
    ocr = sum(int(row["samples"]) for row in rows if row["category"] == "OCR")
    found = _found(load_recipe("warmup"))
    assert found["samples of all rows"] == (606_221_409, total)
    assert total == 557_529_409
    assert found["Caption: samples of its rows"] == (338_381_409, caption)
    assert caption == 340_381_409
    assert found["OCR: samples of its rows"] == (98_000_000, ocr)
    assert ocr == 98_560_000
    for sound in ("Grounding", "Table&Chart", "STEM", "GUI"):
        assert f"{sound}: samples of its rows" not in found


def test_the_sft_total_and_its_shares_do_not_match_the_rows():
    rows = _rows("sft.csv")
    found = _found(load_recipe("sft"))
    assert found["samples of all rows"] == (6_180_645, 6_210_645)
    assert found["printed shares of all rows"] == (100, sum(Decimal(row["percent"]) for row in rows))
    fitting = sum(
        abs(Fraction(row["percent"]) - Fraction(100 * int(row["samples"]), 6_210_645)) <= Fraction(1, 20_000)
        for row in rows
    )
    assert found["rows whose printed share is their share of all rows"] == (143, fitting)


@pytest.mark.parametrize(
    ("name", "file", "total"),
    [
        ("warmup", "warmup.csv", 606_221_409),
        ("multitask", "multitask_interleaved.csv", 48_936_392),
        ("multitask", "multitask_visual_instruction.csv", 38_140_772),
        ("multitask", "multitask_text_instruction.csv", 2_151_763),
        ("sft", "sft.csv", 6_180_645),
    ],
)
def test_shares_are_named_exactly_where_rounding_the_samples_gives_other_digits(name, file, total):
    wrong = set()
    for row in _rows(file):
        digits = len(row["percent"].partition(".")[2])
        if f"{100 * int(row['samples']) / total:.{digits}f}" != row["percent"]:
            wrong.add(f"{row['name']}: share of the printed total")
    names = {f"{row['name']}: share of the printed total" for row in _rows(file)}
    assert {what for what in _found(load_recipe(name)) if what in names} == wrong


def test_the_interleaved_table_is_sound_in_totals_parts_and_shares():
    """HTMLENGPT4o: 2,994,750 twice is 5,989,500; the shares sum to 100.01, which eight roundings allow."""
    recipe = load_recipe("multitask")
    figures = [figure for figure in recompute(recipe) if "Table 12" in figure.where]
    assert sum(figure.kind == "parts" for figure in figures) == 6
    assert [f.recomputed for f in figures if f.kind == "share sum"] == [Decimal("100.01")]
    assert all(figure.adds_up for figure in figures)


def test_the_budgets_of_the_phases_make_447_and_108_billion_tokens():
    first, second = recompute_tokens([load_recipe(name) for name in list_recipes()])
    assert first.adds_up
    assert first.recomputed == (256 + 179 + 12) * 10**9
    assert not second.adds_up
    assert (second.printed, second.recomputed) == (106 * 10**9, (16 + 80 + 12) * 10**9)


def test_the_language_shares_of_the_text_are_far_from_the_share_of_samples():
    language = sum(int(row["samples"]) for row in _rows("sft.csv")[:8])
    finding = audit(load_recipe("sft"))[-1]
    assert (finding.printed, finding.recomputed) == (50, round(Decimal(100 * language) / 6_210_645, 2))
    assert "not of what" in finding.note


def test_the_text_instruction_table_is_sound():
    figures = [figure for figure in recompute(load_recipe("multitask")) if "Table 13" in figure.where]
    assert len(figures) == 8  # total, sum of shares, six shares
    assert all(figure.adds_up for figure in figures)


def test_a_sound_table_has_no_finding():
    assert audit(_recipe(_table(("a", 3, "30.0"), ("b", 7, "70.0")))) == []


def test_a_changed_row_is_found_in_the_total_and_in_its_share():
    recipe = _recipe(_table(("a", 3, "30.0"), ("b", 8, "70.0")))
    assert _found(recipe) == {
        "samples of all rows": (10, 11),
        "b: share of the printed total": (70, 80),
        "rows whose printed share is their share of all rows": (2, 0),  # 27.3 and 72.7
    }


def test_a_tampered_row_of_the_paper_is_found():
    recipe = load_recipe("multitask")
    table = recipe.tables[0]
    first = replace(table.sources[0], samples=5_989_501)
    tampered = replace(recipe, tables=(replace(table, sources=(first, *table.sources[1:])), *recipe.tables[1:]))
    new = _found(tampered).keys() - _found(recipe).keys()
    assert {"samples of all rows", "HTMLENGPT4o: single-image plus multi-image"} <= new


def test_a_subtotal_is_checked_by_samples_by_share_and_by_the_shares_of_its_rows():
    line = Subtotal(category="A", samples=Decimal(9), percent=Decimal("95.0"))
    found = _found(_recipe(_table(("a", 3, "30.0"), ("b", 7, "70.0"), subtotals=(line,))))
    assert found == {
        "sum of the printed subtotals": (10, 9),
        "printed shares of the subtotals": (100, 95),
        "A: samples of its rows": (9, 10),
        "A: share of its printed subtotal": (95, 90),
        "A: printed shares of its rows": (95, 100),
    }


@pytest.mark.parametrize(
    ("share", "samples", "total", "adds_up", "last_digit"),
    [
        ("33.3", 1, 3, True, False),
        ("33.33", 1, 3, True, False),
        ("33.4", 1, 3, False, True),
        ("12.5", 1, 8, True, False),
        ("12", 1, 8, True, False),  # exactly half way: either way of rounding is right
        ("13", 1, 8, True, False),
        ("66.6", 2, 3, False, True),  # cut instead of rounded
        ("66.60", 2, 3, False, False),  # seven hundredths off
        ("0.0", 1, 2000, True, False),  # 0.05 exactly
        ("0.0", 1, 1999, False, True),
    ],
)
def test_a_share_agrees_when_the_exact_value_rounds_to_the_digits_printed(share, samples, total, adds_up, last_digit):
    table = _table(("a", samples, share), ("b", total - samples, "0"), total=str(total))
    (figure,) = [f for f in recompute(_recipe(table)) if f.what == "a: share of the printed total"]
    assert figure.adds_up == adds_up
    if not adds_up:
        assert figure.last_digit_only == last_digit
        assert figure.printed != figure.recomputed


def test_a_sum_of_rounded_shares_may_be_off_by_half_a_unit_for_each_row():
    thirds = [(name, 1, "33.3") for name in "abc"]  # 99.9, and 3 x 0.05 is allowed
    assert audit(_recipe(_table(*thirds, total="3"))) == []
    fourths = _table(("a", 1, "33.3"), ("b", 1, "33.3"), ("c", 1, "33.2"), total="3")  # 99.8 is too little
    assert "printed shares of all rows" in _found(_recipe(fourths))


def test_numbers_in_the_text_are_compared_at_their_own_precision():
    table = _table(("a", 3, "30.0"), ("b", 7, "70.0"))

    def found(kind, printed, what=""):
        statement = Statement(kind=kind, what=what, printed=Decimal(printed), where="text")
        return [finding.recomputed for finding in audit(_recipe(table, statements=(statement,)))]

    assert found("samples", "10") == []
    assert found("samples", "1E1") == []
    assert found("samples", "9") == [10]
    assert found("samples", "2E1") == [10]  # 10 and 20 differ even when known to tens only
    assert found("categories", "2") == [1]
    assert found("share", "1E2", what="A") == []
    assert found("share", "5E1", what="A") == [Decimal("100.00")]


def test_a_missing_row_shows_in_the_numbers_of_the_rows():
    recipe = load_recipe("sft")
    (table,) = recipe.tables
    short = replace(recipe, tables=(replace(table, sources=(*table.sources[:50], *table.sources[51:])),))
    assert _found(short)["number of the last row"] == (143, 142)


def test_the_difference_is_what_the_paper_prints_too_much():
    finding = audit(load_recipe("warmup"))[0]
    assert finding.difference == 606_221_409 - 557_529_409
