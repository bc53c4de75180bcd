# SPDX-License-Identifier: Apache-2.0
"""Recompute the steps of one file of an audit log and compare them; `verify` runs this in several processes.

Called by verify.py for each `LogSpan`. Every part of a log begins with a state of the data order, so each part can be
replayed independently; the caller checks that each part begins where the part before it ends.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindvl_data.audit_lines import AuditLine, read_part
from mindvl_data.audit_log import logged_step
from mindvl_data.config import DataConfig
from mindvl_data.errors import DataError
from mindvl_data.order.data_order import DataOrder
from mindvl_data.order.sources import SourceIndex
from mindvl_data.shards.files import ShardFiles
from mindvl_data.tokenization import load_tokenizer

_MOST_MISSING = 1000  # missing steps that are recomputed so that the steps after them can be compared
MAX_REPORTED = 20  # limit of reported problems; further problems are counted


@dataclass(frozen=True, kw_only=True)
class LogSpan:
    """The lines of one file that belong to a run."""

    file: Path
    is_closed: bool
    until: int | None = None  # only lines before the marks at this step and after it; None: all

    def lines(self) -> Iterator[AuditLine]:
        """Yield the lines.

        Raises:
            DataError: A line is damaged.
        """
        for line in read_part(self.file, is_closed=self.is_closed):
            if self._ends_before(line):
                return
            yield line

    def marks(self) -> tuple[AuditLine | None, list[AuditLine]]:
        """The header of the file, if it has one, and its marks; steps are not parsed.

        Raises:
            DataError: See lines.
        """
        found: list[AuditLine] = []
        for mark in read_part(self.file, is_closed=self.is_closed, only_marks=True):
            if self._ends_before(mark):
                break
            found.append(mark)
        header = found[0] if found and found[0].kind == "part" else None
        return header, [mark for mark in found if mark.kind != "part"]

    def _ends_before(self, line: AuditLine) -> bool:
        if self.until is None:
            return False
        return line.step > self.until or (line.step == self.until and line.kind not in ("packs", "part"))


@dataclass(frozen=True, kw_only=True)
class ReplayJob:
    """A span to replay."""

    config: DataConfig  # current configuration of the run
    global_batch_size: int
    span: LogSpan
    order: dict[str, Any] | None  # state at the beginning; None: the first step
    first_mark: int = 0  # steps before this mark of the span are not replayed; marks are counted from 1
    raises: tuple[dict[str, Any], ...] = ()  # increases of max_epochs at marks of this span and later ones, in order
    saved: dict[str, Any] | None = None  # the data order's state in the newest checkpoint


@dataclass(kw_only=True)
class ReplayResult:
    """The result of a replay."""

    num_steps: int = 0  # compared
    num_samples: int = 0  # of these steps, in the data order
    num_problems: int = 0
    problems: list[str] = field(default_factory=list)
    order: dict[str, Any] | None = None  # state after the last step; None: nothing was replayed

    def add(self, problem: str) -> None:
        """Add a problem; beyond MAX_REPORTED it is only counted."""
        self.num_problems += 1
        if self.num_problems <= MAX_REPORTED:
            self.problems.append(problem)


def replay(job: ReplayJob, report: Callable[[int], None] = lambda steps: None) -> ReplayResult:
    """Recompute the steps of a span and compare them with its lines.

    Args:
        report: Called with the number of steps done since its last call.

    Raises:
        DataError: The log, the index or the tokenizer cannot be read.
    """
    files = ShardFiles(job.config.store)
    try:
        return _Replay(job, files, report).run()
    finally:
        files.close()


class _Replay:
    """The replay of one span, line by line."""

    def __init__(self, job: ReplayJob, files: ShardFiles, report: Callable[[int], None]) -> None:
        self._job, self._files, self._report = job, files, report
        self._tokenizer = load_tokenizer(job.config.tokenizer)
        self._raises = list(job.raises)
        self._result = ReplayResult()
        self._step = 0
        self._data_order: DataOrder | None = None
        self._marks = 0
        if not job.first_mark:
            self._begin(job.order, f"{job.span.file}:1")

    def run(self) -> ReplayResult:
        for line in self._job.span.lines():
            if line.kind in ("change", "branch"):
                self._pass_mark(line)
            elif line.kind == "packs":
                if self._data_order is not None:
                    self._compare(line)
                self._report(1)
        if self._data_order is not None:
            self._result.order = plain(self._data_order.state() if self._state is None else self._state)
        return self._result

    def _begin(self, order: dict[str, Any] | None, where: str) -> None:
        config = self._job.config
        for change in reversed(self._raises):
            config = without_raise(config, change)
        self._sources = [SourceIndex(source, config, self._tokenizer, self._files) for source in config.sources]
        self._data_order = DataOrder(config, self._sources, global_batch_size=self._job.global_batch_size)
        self._state: dict[str, Any] | None = None
        if order is not None:
            try:
                self._data_order.load_state(order)
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
            self._step = order["step"]

    def _pass_mark(self, line: AuditLine) -> None:
        self._marks += 1
        if self._marks < self._job.first_mark:
            return
        if line.kind == "change" and self._raises and self._raises[0] == line.change:
            self._raises.pop(0)
        self._begin(line.order, line.where)

    def _compare(self, line: AuditLine) -> None:
        assert self._data_order is not None
        step = None
        if line.step > self._step + _MOST_MISSING:
            self._result.add(
                f"step {line.step}: more than {_MOST_MISSING} steps are missing before it; later steps were not compared"
            )
            self._data_order = None
            return
        while self._step < line.step:
            step = self._data_order.next_step()
            if step is None:
                self._result.add(f"step {line.step} is logged, but the data order ends at step {self._step}")
                self._step = line.step
                return
            self._step = step.step
            self._result.num_samples += sum(map(len, step.packs))
        if step is None:
            return  # a repeated step, which the caller reports
        self._state = step.state_after
        self._result.num_steps += 1
        expected = logged_step(step, self._sources)
        if expected["packs"] != line.packs:
            self._result.add(f"step {line.step}: {_first_difference(expected['packs'], line.packs)}")
        elif expected["tokens"] != line.tokens:
            self._result.add(
                f"step {line.step}: tokens {line.tokens!s:.200} are logged, the data order has {expected['tokens']}"
            )
        saved = self._job.saved
        if saved is not None and saved["step"] == step.step and saved != plain(step.state_after):
            self._result.add(f"step {step.step}: the newest checkpoint is at another position of the data order")


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """A state after a round trip through JSON, for comparison with a state that was read."""
    same: dict[str, Any] = json.loads(json.dumps(state))
    return same


def is_raise(change: dict[str, Any]) -> bool:
    """Whether an accepted change only raised max_epochs, so that the steps before it can be replayed."""
    pairs = change["sources"].values()
    return bool(pairs) and all(None not in pair and "weight=" in pair[0] and "weight=" in pair[1] for pair in pairs)


def without_raise(config: DataConfig, change: dict[str, Any]) -> DataConfig:
    """The configuration before a change that raised max_epochs."""
    caps = {name: re.search(r"max_epochs=(\d{1,18})", pair[0]) for name, pair in change["sources"].items()}
    sources = tuple(
        replace(source, max_epochs=int(found[1])) if (found := caps.get(source.name)) else source
        for source in config.sources
    )
    return replace(config, sources=sources)


def _first_difference(expected: list[Any], logged: list[Any]) -> str:
    if len(expected) != len(logged):
        return f"{len(logged)} packs are logged, the data order has {len(expected)}"
    pack = next(number for number, (a, b) in enumerate(zip(expected, logged, strict=True)) if a != b)
    pair = logged[pack], expected[pack]
    index = next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
    shown = [f"{samples[index]!s:.200}" if index < len(samples) else "nothing" for samples in pair]
    return f"pack {pack} has {shown[0]} as sample {index}, the data order has {shown[1]}"
