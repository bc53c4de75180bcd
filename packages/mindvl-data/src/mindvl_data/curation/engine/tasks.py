# SPDX-License-Identifier: Apache-2.0
"""What a worker is asked to do: one part of one segment; and the heartbeat by which it is supervised.

A pipeline is cut after each set step. A segment applies the decisions of the set step before it, runs record steps, and
ends with the signatures of the next set step, or with finished samples. Sent by the engines to part_run.py.
"""

import mmap
import os
import struct
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindvl_data.curation.config import InputConfig, LimitsConfig
from mindvl_data.curation.engine.parts import Part

READING, LOADING, DRAWING, WRITING, IDLE = -1, -2, -3, -4, -5  # phases beside the numbers of the steps


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of steps between two set steps.

    Attributes:
        directory: Where its files are written.
        source: Directory of the segment before; None: the input.
        decisions: Directory of the decisions to apply first; None: there is no set step before.
        applied: (number, name) of the set step whose decisions are applied.
        steps: (number, name, parameters) of the record steps.
        signed: (number, name, parameters) of the set step at the end; None: the samples are finished.
        gives: Number of a step -> facts that it gives, for the histograms.
    """

    index: int
    directory: Path
    source: Path | None
    decisions: Path | None
    applied: tuple[int, str] | None
    steps: tuple[tuple[int, str, Any], ...]
    signed: tuple[int, str, Any] | None
    gives: dict[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One part of a segment.

    Attributes:
        number_of_steps: Steps of the whole pipeline.
        failed: (record number, piece, phase) -> reason: work that ended a worker, not to be tried again.
        careful: Ranges of record numbers in which a worker ended; their records are processed one by one.
        wanted: Groups of duplicates that the page shows.
    """

    segment: Segment
    part: Part
    input: InputConfig
    seed: int
    cache: Path
    answers: Path | None
    limits: LimitsConfig
    name: str
    list_dropped: bool
    number_of_steps: int
    failed: dict[tuple[int, int, int], str] = field(default_factory=dict)
    careful: tuple[tuple[int, int], ...] = ()
    wanted: frozenset[str] = frozenset()


class Heartbeat:
    """What a worker is doing, in memory that it shares with its supervisor.

    Args:
        descriptor: A file of at least `Heartbeat.SIZE` bytes; a new one in memory if None.
    """

    _STATE = struct.Struct("<qqqqqd")
    SIZE = 64

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            with tempfile.TemporaryFile() as file:
                os.ftruncate(file.fileno(), self.SIZE)
                descriptor = os.dup(file.fileno())
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, self.SIZE)

    def beat(self, phase: int, number: int = 0, piece: int = 0, count: int = 0, last: int = 0) -> None:
        """Begin some work: phase or step, first record, number of records, number of the last record."""
        self._STATE.pack_into(self._memory, 0, phase, number, piece, count, last, time.monotonic())

    def read(self) -> tuple[int, int, int, int, int, float]:
        """(phase, number, piece, count, last, start of the work in seconds of the monotonic clock)."""
        state: tuple[int, int, int, int, int, float] = self._STATE.unpack_from(self._memory, 0)
        return state

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
        os.close(self.descriptor)
