# SPDX-License-Identifier: Apache-2.0
"""Plan the steps of one file of an audit log again and compare: what `verify` does in several processes at once.

Called by ledger.py, for one `LogSpan` each. Every part of a log begins with the state of the data order there, so each
can be step by itself; that a part ends where the next one begins is compared by the caller.
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

_MOST_MISSING = 1000  # steps that are step although they are not logged, so that those after them can be compared
PROBLEMS_NAMED = 20  # the others are only counted


@dataclass(frozen=True, kw_only=True)
class LogSpan:
    """The lines of one file that belong to a run."""

    file: Path
    is_closed: bool
    until: int | None = None  # only lines before the marks at this step and after it; None: all

    def lines(self) -> Iterator[AuditLine]:
        """One by one.

        Raises:
            DataError: A line is damaged.
        """
        for line in read_part(self.file, is_closed=self.is_closed):
            if self._ends_before(line):
                return
            yield line

    def marks(self) -> tuple[AuditLine | None, list[AuditLine]]:
        """The header of the file, where it has one, and its marks, without reading what the steps hold.

        Raises:
            DataError: As lines.
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
    """What to plan again."""

    config: DataConfig  # of the run as it is now
    global_batch_size: int
    span: LogSpan
    order: dict[str, Any] | None  # where it begins; None: at the very first step
    first_mark: int = 0  # nothing is step before this mark of the span; 1 is the first
    raises: tuple[dict[str, Any], ...] = ()  # changes of max_epochs at marks of this span and later ones, in order
    saved: dict[str, Any] | None = None  # the data order's state in the newest checkpoint


@dataclass(kw_only=True)
class ReplayResult:
    """What came of it."""

    num_steps: int = 0  # compared
    num_samples: int = 0  # of these steps, by the data order
    num_problems: int = 0
    problems: list[str] = field(default_factory=list)
    order: dict[str, Any] | None = None  # the state after the last step; None: nothing was step

    def add(self, problem: str) -> None:
        """Name a problem, or count it where enough are named."""
        self.num_problems += 1
        if self.num_problems <= PROBLEMS_NAMED:
            self.problems.append(problem)


def replay(job: ReplayJob, report: Callable[[int], None] = lambda steps: None) -> ReplayResult:
    """Plan the steps of a span again.

    Args:
        report: Told the number of steps done since it was told last.

    Raises:
        DataError: The log, the index or the tokenizer cannot be read.
    """
    files = ShardFiles(job.config.store)
    try:
        return _Replay(job, files, report).run()
    finally:
        files.close()


class _Replay:
    """One span, line by line."""

    def __init__(self, job: ReplayJob, files: ShardFiles, report: Callable[[int], None]) -> None:
        self._job, self._files, self._report = job, files, report
        self._tokenizer = load_tokenizer(job.config.tokenizer)
        self._raises = list(job.raises)
        self._found = ReplayResult()
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
            self._found.order = plain(self._data_order.state() if self._state is None else self._state)
        return self._found

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
            self._found.add(f"step {line.step}: too many steps are missing before it, so nothing after it was compared")
            self._data_order = None
            return
        while self._step < line.step:
            step = self._data_order.next_step()
            if step is None:
                self._found.add(f"step {line.step} is logged, but the data order ends at step {self._step}")
                self._step = line.step
                return
            self._step = step.step
            self._found.num_samples += sum(map(len, step.packs))
        if step is None:
            return  # a repeated step, which the caller names
        self._state = step.state_after
        self._found.num_steps += 1
        expected = logged_step(step, self._sources)
        if expected["packs"] != line.packs:
            self._found.add(f"step {line.step}: {_first_difference(expected['packs'], line.packs)}")
        elif expected["tokens"] != line.tokens:
            self._found.add(
                f"step {line.step}: tokens {line.tokens!s:.200} are logged, the plan has {expected['tokens']}"
            )
        saved = self._job.saved
        if saved is not None and saved["step"] == step.step and saved != plain(step.state_after):
            self._found.add(f"step {step.step}: the newest checkpoint stands at another place of the plan")


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """A state as it comes back from JSON, to be compared with one that did."""
    same: dict[str, Any] = json.loads(json.dumps(state))
    return same


def is_raise(change: dict[str, Any]) -> bool:
    """Whether an accepted change did nothing but raise max_epochs, so that what lies before it can be step again."""
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
        return f"{len(logged)} packs are logged, the plan has {len(expected)}"
    pack = next(number for number, (a, b) in enumerate(zip(expected, logged, strict=True)) if a != b)
    ours, theirs = expected[pack], logged[pack]
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    shown = [f"{side[place]!s:.200}" if place < len(side) else "nothing" for side in (theirs, ours)]
    return f"pack {pack} has {shown[0]} as sample {place}, the plan has {shown[1]}"
