# SPDX-License-Identifier: Apache-2.0
"""Signatures in memory, so that set steps are tested without an engine."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Decision, Step


@dataclass
class MemorySignatures:
    """The protocol `Signatures` over arrays, in blocks of a few rows."""

    numbers: NDArray[np.uint64]
    pieces: NDArray[np.uint32]
    values: NDArray[np.uint8]
    block_rows: int = 7

    @property
    def width(self) -> int:
        return self.values.shape[1]

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def blocks(self) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint8]]]:
        for start in range(0, len(self.values), self.block_rows):
            part = slice(start, start + self.block_rows)
            yield self.numbers[part], self.pieces[part], self.values[part]


Decide = Callable[[Step, Any, list[Record]], dict[int, Decision]]


@pytest.fixture
def context(tmp_path: Path) -> Context:
    (tmp_path / "cache").mkdir()
    return Context(seed=3, cache=tmp_path / "cache")


@pytest.fixture
def decide(context: Context, tmp_path: Path) -> Decide:
    """Runs a set step on records; returns its decisions by record number."""
    runs = iter(range(1000))

    def run(step: Step, config: Any, records: list[Record]) -> dict[int, Decision]:
        assert step.sign is not None
        assert step.decide is not None
        rows = step.sign(records, config, context)
        assert len(rows) == len(records)
        counts = [len(part) for part in rows]
        stored = MemorySignatures(
            np.repeat(np.array([record.number for record in records], np.uint64), counts),
            np.repeat(np.array([record.piece for record in records], np.uint32), counts),
            np.concatenate(rows) if rows else np.empty((0, 1), np.uint8),
        )
        directory = tmp_path / f"decide-{next(runs)}"
        directory.mkdir()
        found = list(step.decide(stored, config, context, directory))
        decisions = {decision.number: decision for decision in found}
        assert len(decisions) == len(found)
        reasons = {decision.drop.reason for decision in found if decision.drop}
        assert reasons <= step.reasons.keys()
        return decisions

    return run
