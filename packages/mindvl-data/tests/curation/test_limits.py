# SPDX-License-Identifier: Apache-2.0
"""Limits on facts."""

import numpy as np
import pytest

from mindvl_data.curation.limits import Limit, apply_limits, check_range
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Drop
from mindvl_data.errors import SampleError

LIMITS = (Limit("size", 2, 4, "small", "large"), Limit("share", None, 0.5, "", "high"))


def test_the_first_limit_that_fails_gives_the_reason_and_all_facts_are_kept() -> None:
    records = [Record(number=number, id="", body={}) for number in range(4)]
    facts = {"size": np.array([1, 2, 4, 5]), "share": [0.9, 0.5, 0.50000001, None]}
    small, kept, high, large = apply_limits(records, facts, LIMITS)
    assert small == Drop("small", value=1, facts={"size": 1, "share": 0.9})
    assert isinstance(kept, Record)
    assert kept.facts == {"size": 2, "share": 0.5}
    assert high == Drop("high", value=0.5, facts={"size": 4, "share": 0.5})  # decided before rounding
    assert large == Drop("large", value=5, facts={"size": 5})


def test_a_fact_without_a_value_passes_its_limits() -> None:
    (kept,) = apply_limits([Record(number=0, id="", body={})], {"share": [None]}, LIMITS[1:])
    assert isinstance(kept, Record)
    assert kept.facts == {}


def test_a_value_that_is_not_a_number_is_an_error_of_its_record_instead_of_passing() -> None:
    with pytest.raises(SampleError, match=r"share is not a number \(NaN\)"):
        apply_limits([Record(number=0, id="", body={})], {"share": np.array([float("nan")])}, LIMITS[1:])


def test_ranges_that_keep_nothing_are_refused() -> None:
    check_range("x", 0, None)
    with pytest.raises(ValueError, match="max_x: must be at least 0, got -1"):
        check_range("x", None, -1)
    with pytest.raises(ValueError, match="min_x: 2 is larger than max_x, 1"):
        check_range("x", 2, 1)
