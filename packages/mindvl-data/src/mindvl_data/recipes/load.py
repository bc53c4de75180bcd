# SPDX-License-Identifier: Apache-2.0
"""Load the data mixtures of the paper that are included in the package.

Comes before audit.py and mapping.py. The tables are CSV files in this directory, with the figures as printed; totals,
budgets and numbers in the text are in one JSON file per mixture.
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

_NAMES = ("warmup", "multitask", "sft")  # the phases in training order


def list_recipes() -> tuple[str, ...]:
    """The names of the mixtures, in training order."""
    return _NAMES


def load_recipe(name: str) -> Recipe:
    """Load a mixture by name.

    Raises:
        DataError: The name is unknown; the message suggests the nearest one.
    """
    if name not in _NAMES:
        near = difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.0)[0]
        raise DataError(f"{name}: unknown data mixture. Use one of {', '.join(_NAMES)}; the nearest is {near!r}.")
    printed = read_json(f"{name}.json")
    return Recipe(
        name=name,
        title=printed["title"],
        where=printed["where"],
        tables=tuple(_table(table) for table in printed["tables"]),
        budgets=tuple(Budget(**budget | {"tokens": Decimal(budget["tokens"])}) for budget in printed["budgets"]),
        seq_lengths=tuple(printed["seq_lengths"]),
        batch_size=printed["batch_size"],
        statements=tuple(
            Statement(**entry | {"printed": Decimal(entry["printed"])}) for entry in printed["statements"]
        ),
        notes=tuple(printed["notes"]),
    )


def read_json(file: str) -> Any:
    """Parse a JSON file of this directory."""
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
