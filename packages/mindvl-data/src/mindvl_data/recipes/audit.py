# SPDX-License-Identifier: Apache-2.0
"""Recompute every figure that the paper prints about a mixture, and list those that do not agree.

Comes after load.py. Each printed figure is recomputed from the table rows and compared at its printed precision. A share
agrees if the exact value rounds to it, in either direction at a tie; a sum of n rounded shares may differ by n half
units of their last digit.
"""

from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction

from mindvl_data.recipes.load import read_json
from mindvl_data.recipes.types import Finding, FindingKind, Recipe, RecipeSource, RecipeTable, Statement, Subtotal


def audit(recipe: Recipe) -> list[Finding]:
    """The figures of a mixture that do not agree, in the order of the paper."""
    return [finding for finding in recompute(recipe) if not finding.adds_up]


def recompute(recipe: Recipe) -> list[Finding]:
    """Every printed figure of a mixture with its recomputed value."""
    found = [figure for table in recipe.tables for figure in _table_figures(table)]
    return found + [_statement_figure(recipe, statement) for statement in recipe.statements]


def recompute_tokens(recipes: Sequence[Recipe]) -> list[Finding]:
    """The printed number of tokens of the whole training, and the sum of the budgets of the phases."""
    return [
        _figure(
            "tokens",
            f"tokens of {entry['model']}",
            Decimal(entry["tokens"]),
            sum(_budget(recipe, entry["model"]) for recipe in recipes),
            entry["where"],
            note=entry.get("note", ""),
        )
        for entry in read_json("training.json")
    ]


def _table_figures(table: RecipeTable) -> Iterator[Finding]:
    if table.total is None or table.percent is None:
        return  # named in the text only
    rows, where = table.sources, table.where
    samples = _samples(rows)
    yield _figure("total", "samples of all rows", table.total, samples, where)
    if table.subtotals:
        subtotals = sum(line.samples for line in table.subtotals)
        yield _figure("total", "sum of the printed subtotals", table.total, subtotals, where)
    yield _share_sum("printed shares of all rows", table.percent, [row.percent for row in rows], where)
    if table.subtotals:
        yield _share_sum("printed shares of the subtotals", table.percent, [s.percent for s in table.subtotals], where)
    for line in table.subtotals:
        yield from _subtotal_figures(line, table, table.total)
    numbers = [row.number for row in rows if row.number is not None]
    if numbers:
        yield _figure("rows", "number of the last row", Decimal(max(numbers)), len(rows), where)
    for row in rows:
        if row.parts is not None:
            what = f"{row.name}: single-image plus multi-image"
            yield _figure("parts", what, Decimal(row.samples or 0), sum(row.parts), where)
    shared = [(r.name, r.percent, r.samples) for r in rows if r.percent is not None and r.samples is not None]
    for name, percent, count in shared:
        yield _share(f"{name}: share of the printed total", percent, count, int(table.total), where)
    if samples != table.total:  # otherwise the shares were already compared above
        of_rows = [_share(name, percent, count, samples, where).adds_up for name, percent, count in shared]
        what = "rows whose printed share is their share of all rows"
        yield _figure("share", what, Decimal(len(shared)), sum(of_rows), where)


def _subtotal_figures(line: Subtotal, table: RecipeTable, total: Decimal) -> Iterator[Finding]:
    rows = [row for row in table.sources if row.category == line.category]
    yield _figure("subtotal", f"{line.category}: samples of its rows", line.samples, _samples(rows), table.where)
    what = f"{line.category}: share of its printed subtotal"
    yield _share(what, line.percent, int(line.samples), int(total), table.where)
    percents = [row.percent for row in rows]
    yield _share_sum(f"{line.category}: printed shares of its rows", line.percent, percents, table.where, rounded=True)


def _statement_figure(recipe: Recipe, statement: Statement) -> Finding:
    if statement.kind == "budget":
        exact, what = Fraction(_budget(recipe, statement.what)), f"tokens of {statement.what}, as Table 1 has them"
    elif statement.kind == "categories":
        exact, what = Fraction(len(recipe.categories)), "categories"
    elif statement.kind == "samples":
        samples = recipe.categories[statement.what] if statement.what else recipe.samples
        exact, what = Fraction(samples), f"samples of {statement.what or 'all rows'}"
    else:
        exact, what = (
            Fraction(100 * recipe.categories[statement.what], recipe.samples),
            f"{statement.what}: percent of all rows",
        )
    digits = -2 if statement.kind == "share" else 0  # the precision of "8:2" is 10 percent
    return _figure("text", what, statement.printed, exact, statement.where, digits=digits, note=statement.note)


def _share(what: str, percent: Decimal, samples: int, total: int, where: str) -> Finding:
    return _figure("share", what, percent, Fraction(100 * samples, total), where)


def _share_sum(
    what: str, printed: Decimal, percents: Iterable[Decimal | None], where: str, *, rounded: bool = False
) -> Finding:
    """Compare a printed sum of shares; `rounded`: the sum is rounded too, unlike the exact 100."""
    known = [percent for percent in percents if percent is not None]
    slack = sum((_unit(percent) / 2 for percent in known), _unit(printed) / 2 if rounded else Fraction(0))
    return _figure("share sum", what, printed, sum(known, Decimal(0)), where, slack=slack)


def _figure(
    kind: FindingKind,
    what: str,
    printed: Decimal,
    exact: Fraction | Decimal | int,
    where: str,
    *,
    slack: Fraction | None = None,
    digits: int = 0,
    note: str = "",
) -> Finding:
    """Compare one figure.

    Args:
        slack: Largest difference that agrees; half a unit of the last printed digit if left out.
        digits: The recomputed value is shown to the printed exponent or to this one, whichever is finer.
    """
    value = Fraction(exact)
    return Finding(
        kind=kind,
        what=what,
        printed=printed,
        recomputed=_rounded(value, min(_exponent(printed), digits)),
        where=where,
        adds_up=abs(Fraction(printed) - value) <= (_unit(printed) / 2 if slack is None else slack),
        note=note,
    )


def _rounded(value: Fraction, exponent: int) -> Decimal:
    scaled = value / Fraction(10) ** exponent
    return Decimal((2 * scaled.numerator + scaled.denominator) // (2 * scaled.denominator)).scaleb(exponent)  # half up


def _exponent(printed: Decimal) -> int:
    return int(printed.as_tuple().exponent)


def _unit(printed: Decimal) -> Fraction:
    return Fraction(10) ** _exponent(printed)


def _samples(rows: Iterable[RecipeSource]) -> int:
    return sum(row.samples or 0 for row in rows)


def _budget(recipe: Recipe, model: str) -> int:
    return sum(int(b.tokens) for b in recipe.budgets if b.model == model and b.category is None)
