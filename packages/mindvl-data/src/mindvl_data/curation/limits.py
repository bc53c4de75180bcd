# SPDX-License-Identifier: Apache-2.0
"""Limits on measured values: a record outside one of them is dropped, with the value, under the reason of that limit.

Used by the rules on texts and images and by the steps with model scores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Drop, Outcome
from mindvl_data.errors import SampleError

ROUNDING = 6  # decimals of a fact; decisions use the value before rounding


@dataclass(frozen=True)
class Limit:
    """The range of a fact, both ends included.

    Attributes:
        fact: Name of the fact.
        minimum, maximum: Ends of the range; None: no limit.
        too_low, too_high: Reason codes.
    """

    fact: str
    minimum: float | None = None
    maximum: float | None = None
    too_low: str = ""
    too_high: str = ""


def check_range(name: str, minimum: float | None, maximum: float | None, *, lowest: float = 0.0) -> None:
    """Refuse a range that is empty or negative.

    Raises:
        ValueError: The range of `min_NAME` and `max_NAME` is not valid.
    """
    for end, value in (("min", minimum), ("max", maximum)):
        if value is not None and not value >= lowest:
            raise ValueError(f"{end}_{name}: must be at least {lowest:g}, got {value}. Use a larger value.")
    if minimum is not None and maximum is not None and minimum > maximum:
        raise ValueError(f"min_{name}: {minimum} is larger than max_{name}, {maximum}. No record would be kept.")


def apply_limits(
    records: Sequence[Record], facts: Mapping[str, Sequence[Any] | np.ndarray], limits: Sequence[Limit]
) -> list[Outcome]:
    """Add the facts to the records, and drop those outside a limit.

    Args:
        records: The batch.
        facts: For each fact its values, one per record; a record whose value is None passes its limits.
        limits: Checked in this order; the first that fails gives the reason.

    Raises:
        SampleError: A value with a limit is NaN, for example because a model does not work for an image.
    """
    columns = {name: values.tolist() if isinstance(values, np.ndarray) else values for name, values in facts.items()}
    names = tuple(columns)
    active = [
        (names.index(limit.fact), end, sign, reason)
        for limit in limits
        for end, sign, reason in ((limit.minimum, 1, limit.too_low), (limit.maximum, -1, limit.too_high))
        if end is not None
    ]
    outcomes: list[Outcome] = []
    for record, values in zip(records, zip(*columns.values(), strict=True), strict=True):
        measured = {
            name: round(value, ROUNDING) if isinstance(value, float) else value
            for name, value in zip(names, values, strict=True)
            if value is not None
        }
        for index, end, sign, reason in active:
            value = values[index]
            if value is not None and value != value:
                raise SampleError(
                    f"{names[index]} is not a number (NaN), so that it cannot be compared with its limits"
                )
            if value is not None and (value < end if sign == 1 else value > end):
                outcomes.append(Drop(reason, value=measured[names[index]], facts=measured))
                break
        else:
            outcomes.append(record.with_facts(**measured))
    return outcomes
