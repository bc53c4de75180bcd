# SPDX-License-Identifier: Apache-2.0
"""A published data mixture: its sources and the figures of the paper.

Built by load.py from the tables in this directory; used by audit.py and mapping.py. A printed number is a Decimal whose
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
    number: int | None = None  # row number, if the table has one
    parts: tuple[int, int] | None = None  # samples with one and with several images, if the table has them

    @property
    def directory(self) -> str:
        """Its directory name below a root of shards: lower case, with one dash for anything but letters and digits."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@dataclass(frozen=True, kw_only=True)
class Subtotal:
    """The printed subtotal of one category."""

    category: str
    samples: Decimal
    percent: Decimal


@dataclass(frozen=True, kw_only=True)
class RecipeTable:
    """One table of the paper, or a source that appears only in the text."""

    where: str  # place in the paper
    sources: tuple[RecipeSource, ...]
    total: Decimal | None = None  # samples, as printed
    percent: Decimal | None = None  # the total of the percent column, as printed
    subtotals: tuple[Subtotal, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The training tokens of one model in this phase, or in one category of it."""

    model: str
    tokens: Decimal
    where: str
    category: str | None = None  # None: the whole phase
    of_all_samples: bool = True  # False: the model is trained on a part of the data only


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
    """The data mixture of one phase."""

    name: str
    title: str
    where: str
    tables: tuple[RecipeTable, ...]
    budgets: tuple[Budget, ...]
    seq_lengths: tuple[int, ...]  # tokens in a packed sequence; several values: one run each
    batch_size: int  # packs per optimizer step
    statements: tuple[Statement, ...] = ()
    notes: tuple[str, ...] = ()  # remarks on the figures

    def __post_init__(self) -> None:
        for attribute in ("name", "directory"):
            values = [getattr(source, attribute) for source in self.sources]
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise DataError(f"mixture {self.name}: {attribute} {twice} appears twice. Rename one of them.")

    @property
    def sources(self) -> tuple[RecipeSource, ...]:
        """All sources, in the order of the paper."""
        return tuple(source for table in self.tables for source in table.sources)

    @property
    def samples(self) -> int:
        """The number of samples of all sources with a known count."""
        return sum(source.samples or 0 for source in self.sources)

    @property
    def categories(self) -> dict[str, int]:
        """The number of samples of each category, in the order of the paper."""
        counts: dict[str, int] = {}
        for source in self.sources:
            counts[source.category] = counts.get(source.category, 0) + (source.samples or 0)
        return counts

    def steps(self, budget: Budget, seq_length: int) -> int:
        """The number of optimizer steps for `budget` with full packs of `seq_length` tokens."""
        return int(budget.tokens) // (seq_length * self.batch_size)

    def tokens_per_sample(self, budget: Budget) -> float | None:
        """Mean tokens per sample for one epoch; None if a count is unknown or only a part of the data is used."""
        rows = [source for source in self.sources if budget.category in (None, source.category)]
        counts = [source.samples for source in rows if source.samples is not None]
        known = counts and len(counts) == len(rows) and budget.of_all_samples
        return float(budget.tokens) / sum(counts) if known else None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One printed figure and its recomputed value."""

    kind: FindingKind
    what: str
    printed: Decimal
    recomputed: Decimal  # rounded to the digits printed
    where: str  # place in the paper
    adds_up: bool  # printed and recomputed agree within the rounding of what is printed
    note: str = ""

    @property
    def difference(self) -> Decimal:
        """Printed minus recomputed value."""
        return self.printed - self.recomputed

    @property
    def last_digit_only(self) -> bool:
        """Whether the difference is one unit of the last printed digit, as from truncation instead of rounding."""
        return abs(self.difference) == Decimal(1).scaleb(int(self.printed.as_tuple().exponent))
