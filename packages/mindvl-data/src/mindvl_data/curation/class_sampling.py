# SPDX-License-Identifier: Apache-2.0
"""Sample records by class: a number per class, or shares (paper, appendix B.3: sampling guided by the capability taxonomy,
and a ratio of multimodal to language data of 1:1).

A set step: each record has a random number that depends on the seed and its position only, and of each class those with
the lowest numbers are kept. Three passes over the signatures count, find the last number that is kept, and decide, so that
memory does not grow with the number of records.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Decision, Drop, Signatures, Step, register
from mindvl_data.errors import DataError, SampleError

_BINS = 1 << 12
_ROW = np.dtype([("random", "<u8"), ("class", "<u2")])
_UNNAMED = (1 << 16) - 1


@dataclass(frozen=True, kw_only=True)
class SampleByClass:
    """Parameters of `sample_by_class`. Records of classes that are not named are dropped.

    Attributes:
        fact: Fact with the class, for example `capability` or `modality`.
        quotas: Class -> number of records; a class with fewer records keeps all of them.
        shares: Class -> share. Only the ratios matter: {text: 1, image: 1} keeps as many of one as of the other. Shares
            are rounded to numbers by the largest remainder method.
        total: With shares: number of records. If a class has fewer than its share, all of it is kept, and the others
            are increased in proportion. Without it, the largest number for which the shares hold for every class.
    """

    fact: str = "capability"
    quotas: dict[str, int] | None = None
    shares: dict[str, float] | None = None
    total: int | None = None

    def __post_init__(self) -> None:
        if (self.quotas is None) == (self.shares is None):
            raise ValueError("quotas, shares: exactly one of them is needed. Set one.")
        for name, amount in (self.quotas or self.shares or {}).items():
            if not 0 <= amount < 1e15:
                raise ValueError(
                    f"{'quotas' if self.quotas else 'shares'}: {name}: must not be negative, got {amount}."
                )
        if not any((self.quotas or self.shares or {}).values()):
            raise ValueError("quotas, shares: no class has a positive value. Set one.")
        if self.total is not None and (self.shares is None or self.total < 1):
            raise ValueError(f"total: must be a positive number beside shares, got {self.total}. Remove or correct it.")

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return tuple(self.quotas or self.shares or ())

    def targets(self, counts: Sequence[int]) -> list[int]:
        """Numbers of records to keep, for the numbers of records that there are, in the order of `classes`."""
        if self.quotas is not None:
            return [min(quota, count) for quota, count in zip(self.quotas.values(), counts, strict=True)]
        assert self.shares is not None
        shares = [Fraction(str(share)) for share in self.shares.values()]
        return by_shares(shares, counts, self.total)


def by_shares(shares: Sequence[Fraction], counts: Sequence[int], total: int | None) -> list[int]:
    """Numbers of records per class by largest remainder, at most `counts`; see `SampleByClass.total`."""
    if total is None:
        whole = sum(shares)
        total = min(int(count * whole / share) for share, count in zip(shares, counts, strict=True) if share)
    targets = [0] * len(shares)
    open_classes = [number for number, share in enumerate(shares) if share]
    left = total
    while True:
        whole = sum(shares[number] for number in open_classes)
        ideals = {number: left * shares[number] / whole for number in open_classes}
        scarce = [number for number in open_classes if ideals[number] > counts[number]]
        if not scarce:
            break
        for number in scarce:
            targets[number] = counts[number]
            left -= counts[number]
        open_classes = [number for number in open_classes if number not in scarce]
        if not open_classes:
            return targets
    for number in open_classes:
        targets[number] = int(ideals[number])
    missing = left - sum(targets[number] for number in open_classes)
    order = sorted(open_classes, key=lambda number: (int(ideals[number]) - ideals[number], number))
    for number in order[:missing]:
        targets[number] += 1
    return targets


def sign(records: list[Record], config: SampleByClass, context: Context) -> Sequence[NDArray[np.uint8]]:
    """A random number and the class of each record (paper, appendix B.3)."""
    numbers = {name: number for number, name in enumerate(config.classes)}
    found = []
    for record in records:
        if config.fact not in record.facts:
            raise SampleError(f"the record has no fact {config.fact!r}; put the step that gives it before this one")
        row = np.zeros(1, _ROW)
        row["random"] = context.random(record, f"sample_by_class {config.fact}").getrandbits(64)
        row["class"] = numbers.get(str(record.facts[config.fact]), _UNNAMED)
        found.append(row.view(np.uint8).reshape(1, _ROW.itemsize))
    return found


def decide(signatures: Signatures, config: SampleByClass, context: Context, directory: Path) -> Iterable[Decision]:
    """Keep the records with the lowest random numbers of each class (paper, appendix B.3)."""
    num_classes = len(config.classes)
    histogram = np.zeros((num_classes, _BINS), np.int64)
    for _, _, rows in signatures.blocks():
        random, kind = _columns(rows)
        named = kind != _UNNAMED
        np.add.at(histogram, (kind[named], (random[named] >> np.uint64(52)).astype(np.int64)), 1)
    counts = histogram.sum(axis=1).tolist()
    absent = [name for name, count in zip(config.classes, counts, strict=True) if not count]
    absent = [name for name in absent if config.shares is not None and config.shares[name] > 0 and config.total is None]
    if absent:
        raise DataError(
            f"sample_by_class: shares: no record has the {config.fact} {absent[0]!r}, so that its share cannot hold. "
            "Remove it, or set total."
        )
    targets = config.targets(counts)
    last_bin = [int(np.searchsorted(np.cumsum(histogram[k]), max(targets[k], 1))) for k in range(num_classes)]
    last_kept = _last_kept(signatures, targets, histogram, last_bin)
    for numbers, pieces, rows in signatures.blocks():
        random, kind = _columns(rows)
        for number, piece, value, k in zip(
            numbers.tolist(), pieces.tolist(), random.tolist(), kind.tolist(), strict=True
        ):
            if k == _UNNAMED:
                yield Decision(number, piece, Drop("class_not_named"))
            elif last_kept[k] is None or (value, number, piece) > last_kept[k]:
                yield Decision(number, piece, Drop("over_share", f"{config.classes[k]}: {targets[k]} of {counts[k]}"))


def _last_kept(
    signatures: Signatures, targets: list[int], histogram: NDArray[np.int64], last_bin: list[int]
) -> list[tuple[int, int, int] | None]:
    """(random number, record number, piece) of the last record that is kept of each class; None if none is."""
    candidates: list[list[tuple[int, int, int]]] = [[] for _ in targets]
    for numbers, pieces, rows in signatures.blocks():
        random, kind = _columns(rows)
        for k, bin_ in enumerate(last_bin):
            chosen = np.flatnonzero((kind == k) & ((random >> np.uint64(52)) == bin_))
            candidates[k] += zip(
                random[chosen].tolist(), numbers[chosen].tolist(), pieces[chosen].tolist(), strict=True
            )
    found: list[tuple[int, int, int] | None] = []
    for k, target in enumerate(targets):
        before = int(histogram[k, : last_bin[k]].sum())
        found.append(sorted(candidates[k])[target - before - 1] if target else None)
    return found


def _columns(rows: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    values = np.ascontiguousarray(rows).view(_ROW)[:, 0]
    return values["random"], values["class"].astype(np.int64)


register(
    Step(
        name="sample_by_class",
        config=SampleByClass,
        summary="Keep a number or a share of the records of each class.",
        section="B.3",
        reasons={
            "over_share": "The class has more records than its quota or share.",
            "class_not_named": "The class is not among those to sample.",
        },
        sign=sign,
        decide=decide,
    )
)
