# SPDX-License-Identifier: Apache-2.0
"""Read the recipes that ship with the package.

Comes before audit.py and mapping.py. The rows are CSV files beside this file, with the figures as the paper prints
them; what else it prints about them (totals, budgets, numbers in the text) is in one JSON file for each recipe.
"""

import csv
import difflib
import io
import json
from decimal import Decimal
from importlib.resources import files
from typing import Any

from mindvl_data import DataError
from mindvl_data.recipes.types import Budget, Recipe, RecipeSource, RecipeTable, Statement, Subtotal

_NAMES = ("warmup", "multitask", "sft")  # the phases, in their order


def list_recipes() -> tuple[str, ...]:
    """The names of the recipes, in the order of training."""
    return _NAMES


def load_recipe(name: str) -> Recipe:
    """One recipe by its name.

    Raises:
        DataError: There is no such recipe; the message names the nearest.
    """
    if name not in _NAMES:
        near = difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.0)[0]
        raise DataError(f"{name!r} is no recipe. Known: {', '.join(_NAMES)}. Did you mean {near!r}?")
    printed = read_json(f"{name}.json")
    return Recipe(
        name=name,
        title=printed["title"],
        where=printed["where"],
        tables=tuple(_table(table) for table in printed["tables"]),
        budgets=tuple(Budget(**budget | {"tokens": Decimal(budget["tokens"])}) for budget in printed["budgets"]),
        seq_lengths=tuple(printed["seq_lengths"]),
        batch_size=printed["batch_size"],
        statements=tuple(Statement(**said | {"printed": Decimal(said["printed"])}) for said in printed["statements"]),
        notes=tuple(printed["notes"]),
    )


def read_json(file: str) -> Any:
    """A JSON file of this directory, as it is."""
    return json.loads(_text(file))


def _text(file: str) -> str:
    return (files("mindvl_data.recipes") / file).read_text(encoding="utf-8")


def _table(printed: dict[str, Any]) -> RecipeTable:
    return RecipeTable(
        where=printed["where"],
        sources=tuple(_source(row) for row in csv.DictReader(io.StringIO(_text(printed["file"])))),
        total=_decimal(printed.get("total")),
        percent=_decimal(printed.get("percent")),
        subtotals=tuple(
            Subtotal(category=line["category"], samples=Decimal(line["samples"]), percent=Decimal(line["percent"]))
            for line in printed.get("subtotals", ())
        ),
    )


def _source(row: dict[str, str]) -> RecipeSource:
    single = row.get("single_image")
    return RecipeSource(
        name=row["name"],
        category=row["category"],
        samples=int(row["samples"]) if row["samples"] else None,
        percent=_decimal(row["percent"]),
        number=int(row["number"]) if "number" in row else None,
        parts=(int(single), int(row["multi_image"])) if single else None,
    )


def _decimal(text: str | None) -> Decimal | None:
    return Decimal(text) if text else None
