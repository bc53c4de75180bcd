# SPDX-License-Identifier: Apache-2.0
"""Quotas and shares of classes; the targets are computed by hand."""

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindvl_data.curation.class_sampling import SampleByClass, by_shares
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, find_step
from mindvl_data.errors import DataError, SampleError

STEP = find_step("sample_by_class")


def _records(**counts: int) -> list[Record]:
    names = [name for name, count in counts.items() for _ in range(count)]
    return [
        Record(number=number, id=str(number), body={}, facts={"capability": name}) for number, name in enumerate(names)
    ]


def _kept(records: list[Record], decisions: dict[int, Any]) -> list[Record]:
    return [record for record in records if record.number not in decisions]


def _shares(*values: str) -> list[Fraction]:
    return [Fraction(value) for value in values]


@pytest.mark.parametrize(
    ("shares", "counts", "total", "expected"),
    [
        # 10 * 1/3 = 3 + 1/3 each: one is missing, it goes to the first
        (("1", "1", "1"), (99, 99, 99), 10, [4, 3, 3]),
        # 7 * 0.5 = 3.5, 7 * 0.3 = 2.1, 7 * 0.2 = 1.4: the largest remainder is the first
        (("0.5", "0.3", "0.2"), (99, 99, 99), 7, [4, 2, 1]),
        # the first has 2 of 5; the other 8 are shared 3 to 2: 4.8 and 3.2
        (("5", "3", "2"), (2, 99, 99), 10, [2, 5, 3]),
        # after the first (2 of 5), the second has 4 of 4.8, and the third makes up for it
        (("5", "3", "2"), (2, 4, 99), 10, [2, 4, 4]),
        (("1", "1"), (3, 4), 100, [3, 4]),
        (("1", "0"), (9, 9), 4, [4, 0]),
        # without a total: 30 / 0.75 = 40 and 20 / 0.25 = 80, so 40: 30 and 10
        (("3", "1"), (30, 20), None, [30, 10]),
        # 7 / (1/3) = 21 and 5 / (1/3) = 15: 15, 5 each
        (("1", "1", "1"), (7, 9, 5), None, [5, 5, 5]),
    ],
)
def test_numbers_follow_shares_by_largest_remainder(
    shares: Any, counts: Any, total: int | None, expected: list[int]
) -> None:
    assert by_shares(_shares(*shares), counts, total) == expected


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), min_size=1, max_size=6), st.integers(1, 200))
def test_a_total_is_reached_if_there_are_enough_records(classes: list[tuple[int, int]], total: int) -> None:
    shares, counts = [Fraction(share) for share, _ in classes], [count for _, count in classes]
    available = sum(count for share, count in classes if share)
    found = by_shares(shares, counts, total) if any(shares) else [0] * len(classes)
    assert all(0 <= amount <= count for amount, count in zip(found, counts, strict=True))
    assert sum(found) == (min(total, available) if any(shares) else 0)


def test_quotas_keep_exactly_as_many_and_drop_other_classes(decide: Any) -> None:
    records = _records(ocr=40, math=30, gui=5, poetry=10)
    config = SampleByClass(quotas={"ocr": 12, "math": 7, "gui": 9})
    decisions = decide(STEP, config, records)
    assert Counter(record.facts["capability"] for record in _kept(records, decisions)) == {
        "ocr": 12,
        "math": 7,
        "gui": 5,
    }
    reasons = Counter(decision.drop.reason for decision in decisions.values())
    assert reasons == {"over_share": 28 + 23, "class_not_named": 10}
    assert decisions[0].drop is None or decisions[0].drop.value == "ocr: 12 of 40"


def test_shares_hold_exactly(decide: Any) -> None:
    records = _records(text=100, image=37)
    kept = _kept(records, decide(STEP, SampleByClass(shares={"text": 1, "image": 1}), records))
    assert Counter(record.facts["capability"] for record in kept) == {"text": 37, "image": 37}


def test_the_choice_depends_on_the_seed_and_not_on_the_order(context: Context, decide: Any) -> None:
    records = _records(ocr=60)
    config = SampleByClass(quotas={"ocr": 20})
    first = {record.number for record in _kept(records, decide(STEP, config, records))}
    assert first == {record.number for record in _kept(records, decide(STEP, config, records[::-1]))}
    fewer = {record.number for record in _kept(records, decide(STEP, SampleByClass(quotas={"ocr": 10}), records))}
    assert fewer < first  # a smaller quota keeps a part of a larger one
    randoms = {
        number: context.random(records[number], "sample_by_class capability").getrandbits(64) for number in range(60)
    }
    assert first == set(sorted(randoms, key=lambda number: randoms[number])[:20])


def test_a_class_without_records_cannot_have_a_share(decide: Any) -> None:
    with pytest.raises(DataError, match="no record has the capability 'gui'"):
        decide(STEP, SampleByClass(shares={"ocr": 1, "gui": 1}), _records(ocr=5))
    records = _records(ocr=5)
    assert len(_kept(records, decide(STEP, SampleByClass(shares={"ocr": 1, "gui": 1}, total=4), records))) == 4


def test_a_record_without_the_fact_fails(decide: Any) -> None:
    with pytest.raises(SampleError, match="no fact 'capability'"):
        decide(STEP, SampleByClass(quotas={"ocr": 1}), [Record(number=0, id="0", body={})])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of them"),
        ({"quotas": {"a": 1}, "shares": {"a": 1}}, "exactly one of them"),
        ({"quotas": {"a": -1}}, "quotas: a: must not be negative"),
        ({"shares": {"a": 0}}, "no class has a positive value"),
        ({"quotas": {"a": 1}, "total": 3}, "total:"),
    ],
)
def test_wrong_parameters_name_their_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampleByClass(**fields)
