# SPDX-License-Identifier: Apache-2.0
"""`sum` as Python 3.11 defines it for floats, from left to right, and as 3.12 does, with Neumaier's compensation."""

import builtins
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest


def sum_from_left(values: Iterable[Any], /, start: Any = 0) -> Any:
    total = start
    for value in values:
        total = total + value
    return total


def sum_compensated(values: Iterable[Any], /, start: Any = 0) -> Any:
    total, lost = start, 0.0
    for value in values:
        before, total = total, total + value
        if isinstance(total, float):
            lost += (before - total) + value if abs(before) >= abs(value) else (value - total) + before
    return total + lost if isinstance(total, float) else total


@pytest.fixture
def each_sum(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Iterator[None]]:
    """`for _ in each_sum():` runs its block under both definitions, whatever the Python is."""

    def both() -> Iterator[None]:
        for definition in (sum_from_left, sum_compensated):
            with monkeypatch.context() as context:
                context.setattr(builtins, "sum", definition)
                yield

    return both
