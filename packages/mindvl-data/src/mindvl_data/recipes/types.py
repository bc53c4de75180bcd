# SPDX-License-Identifier: Apache-2.0
"""A published data recipe: its sources, and what the paper prints about them.

Made by load.py from the tables in this directory; read by audit.py and mapping.py. A printed number is a Decimal whose
exponent is its precision: `55.81` is known to 0.01, `256E9` to a billion.
Source: "MindVL: Towards Efficient and Effective Training of Multimodal Large Language Models on Ascend NPUs".
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from mindvl_data import DataError

FindingKind = Literal["total", "subtotal", "share", "share sum", "parts", "rows", "text", "tokens"]


@dataclass(frozen=True, kw_only=True)
class RecipeSource:
    """One row of a table."""

    name: str  # as the paper prints it
    category: str
    samples: int | None  # None: the paper prints no count
    percent: Decimal | None = None  # as printed, of the total of its table
    number: int | None = None  # of the row, where the table counts its rows
    parts: tuple[int, int] | None = None  # samples with one image and with several, where the table says

    @property
    def directory(self) -> str:
        """Its directory name below a root of shards: lower case, with one dash for anything but letters and digits."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@dataclass(frozen=True, kw_only=True)
class Subtotal:
    """What a table prints for one category."""

    category: str
    samples: Decimal
    percent: Decimal


@dataclass(frozen=True, kw_only=True)
class RecipeTable:
    """One table of the paper, or a source that is named in its text only."""

    where: str  # place in the paper
    sources: tuple[RecipeSource, ...]
    total: Decimal | None = None  # samples, as printed
    percent: Decimal | None = None  # the total of the percent column, as printed
    subtotals: tuple[Subtotal, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Tokens that one model is trained on in this phase, or in one category of it."""

    model: str
    tokens: Decimal
    where: str
    category: str | None = None  # None: the whole phase
    of_all_samples: bool = True  # False: the model sees a part of the data only


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A number in the running text that follows from the tables."""

    kind: Literal["budget", "samples", "share", "categories"]
    what: str  # the model of a budget, the category of samples (empty: all) or of a share
    printed: Decimal
    where: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The data of one phase."""

    name: str
    title: str
    where: str
    tables: tuple[RecipeTable, ...]
    budgets: tuple[Budget, ...]
    seq_lengths: tuple[int, ...]  # tokens in a pack; several: one run with each
    batch_size: int  # rows in a step
    statements: tuple[Statement, ...] = ()
    notes: tuple[str, ...] = ()  # what a reader of the figures has to know

    def __post_init__(self) -> None:
        for attribute in ("name", "directory"):
            values = [getattr(source, attribute) for source in self.sources]
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise DataError(f"{attribute} {twice} appears twice. recipe {self.name}. Rename one of them.")

    @property
    def sources(self) -> tuple[RecipeSource, ...]:
        """Every source, in the order of the paper."""
        return tuple(source for table in self.tables for source in table.sources)

    @property
    def samples(self) -> int:
        """Samples of all sources whose count is known."""
        return sum(source.samples or 0 for source in self.sources)

    @property
    def categories(self) -> dict[str, int]:
        """Samples of each category, in the order of the paper."""
        counts: dict[str, int] = {}
        for source in self.sources:
            counts[source.category] = counts.get(source.category, 0) + (source.samples or 0)
        return counts

    def steps(self, budget: Budget, seq_length: int) -> int:
        """Updates that `budget` allows with full rows of `seq_length` tokens."""
        return int(budget.tokens) // (seq_length * self.batch_size)

    def tokens_per_sample(self, budget: Budget) -> float | None:
        """Mean tokens if each sample is seen once; None where a count is unknown or only a part is seen."""
        rows = [source for source in self.sources if budget.category in (None, source.category)]
        counts = [source.samples for source in rows if source.samples is not None]
        known = counts and len(counts) == len(rows) and budget.of_all_samples
        return float(budget.tokens) / sum(counts) if known else None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One printed figure beside the same figure recomputed."""

    kind: FindingKind
    what: str
    printed: Decimal
    recomputed: Decimal  # rounded to the digits printed
    where: str  # place in the paper
    adds_up: bool  # printed and recomputed agree within the rounding of what is printed
    note: str = ""

    @property
    def difference(self) -> Decimal:
        """What the paper prints too much; negative: too little."""
        return self.printed - self.recomputed

    @property
    def last_digit_only(self) -> bool:
        """Whether it is off by one in the last digit printed, as by cutting instead of rounding."""
        return abs(self.difference) == Decimal(1).scaleb(int(self.printed.as_tuple().exponent))
