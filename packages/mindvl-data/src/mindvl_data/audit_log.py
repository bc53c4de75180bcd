# SPDX-License-Identifier: Apache-2.0
"""The audit log: one JSON line for every step, in order, saying which samples it consumed.

Written by the loader of the first data-parallel rank, read by ledger.py. Besides steps a log can hold marks, which
stand after the step they name and carry the plan's state there: the data changed and somebody accepted it, or the
run was branched off another one whose log holds the steps before.
"""

import hashlib
import json
import mmap
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from mindvl_data.errors import DataError
from mindvl_data.log_file import LogFile
from mindvl_data.plan.planner import PlannedStep
from mindvl_data.plan.sources import SourceIndex

Use = list[Any]  # [source, epoch, shard, row in shard]

_LINE_START = b'{"step":'
_LINE = re.compile(rb'\{"step":(\d+),"(rows|change|branch)":')
_LINE_HEAD = 48  # bytes; more than the step's number and the kind of line can take


@dataclass(frozen=True, kw_only=True)
class AuditLine:
    """One line of a log."""

    step: int
    kind: Literal["rows", "change", "branch"]
    when: str  # UTC, to the second
    rows: list[list[Use]] = field(default_factory=list)  # of a step
    tokens: dict[str, int] = field(default_factory=dict)  # of a step, by source
    change: dict[str, Any] = field(default_factory=dict)  # of a change: who, and what, as the ledger state keeps it
    plan: dict[str, Any] = field(default_factory=dict)  # of a mark: the state the plan goes on from
    sources: list[str] = field(default_factory=list)  # of a mark: the sources that the state counts


class AuditLog:
    """Appends lines. What a stopped run logged beyond the step that its successor starts from is dropped.

    So each step stands there once, in order; a last line cut off by a kill is dropped too. Nothing is dropped before
    the first write, and a run that starts anew drops only what it is going to log again.

    Args:
        identities: As in the ledger state. Their hash stands in the line of step 1.

    Raises:
        DataError: The file holds something other than an audit log, or cannot be written.
    """

    def __init__(self, path: Path, sources: Sequence[SourceIndex], identities: dict[str, str]) -> None:
        self._path = path
        self._file = LogFile(path, "audit")
        self._sources = sources
        self._plan_id = hashlib.sha256(json.dumps(identities, sort_keys=True).encode()).hexdigest()[:16]
        self._is_fresh = True  # nothing was recorded since the log was opened
        if not _LINE_START.startswith(self._file.head(len(_LINE_START))):
            raise _foreign(path, 0)

    def record(self, step: PlannedStep) -> None:
        """Write the step's samples by row.

        Raises:
            DataError: The line cannot be written, and nothing of it was; the step can be recorded again. Or the run
                starts anew, but the log holds what it would not log again.
        """
        if self._is_fresh:
            self._start_anew()
        plan_id = {"plan_id": self._plan_id} if step.step == 1 else {}
        self._append({"step": step.step, **logged_step(step, self._sources), **plan_id})

    def claim(self, step: int) -> None:
        """Be the only writer, and check that the log can go on after `step`; nothing in the file is changed.

        Raises:
            DataError: Another loader writes it, or it holds something other than an audit log.
        """
        self._file.lock()
        self._find(step)

    def resume(self, step: int, plan: dict[str, Any], changes: Sequence[dict[str, Any]]) -> None:
        """Go on after `step`: drop the lines after it, and mark what the steps alone would not explain.

        Args:
            plan: The plan's state after `step`, as it goes on from there.
            changes: All data changes that were accepted so far, each with the step it follows.

        Raises:
            DataError: As `claim`, or the log cannot be written.
        """
        self.claim(step)
        keep, last = self._find(step)
        self._file.cut(keep)
        self._is_fresh = False
        place = {"plan": plan, "sources": [source.name for source in self._sources]}
        if last < step:
            self._append({"step": step, "branch": last, **place})
        for change in changes:
            if change["step"] == step:
                self._append({"step": step, "change": change, **place})

    def sync(self) -> None:
        """Have it on disk before a checkpoint says that the steps were done."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, line: dict[str, Any]) -> None:
        line["when"] = now()
        self._file.append(line)

    def _start_anew(self) -> None:
        """Drop what a run of the very same plan logged before it had a checkpoint; refuse to drop anything else."""
        self._file.lock()
        with open(self._path, "rb") as file:
            first = file.readline(self._file.size())
        if first.endswith(b"\n") and (_plan_id(first) != self._plan_id or count_lines(self._path)[1]):
            raise DataError(
                f"audit log holds steps that this run would not log again, as it starts anew. {self._path}. "
                "Resume the run that wrote it, name another data.audit_log, or remove the file."
            )
        self._file.cut(0)
        self._is_fresh = False

    def _find(self, last_step: int) -> tuple[int, int]:
        """(bytes, last step) of the whole lines up to `last_step`, without marks there.

        Read from the end, because it can be long.
        """
        if not self._file.size():
            return 0, 0  # an empty file cannot be mapped
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            keep, last = content.rfind(b"\n") + 1, 0
            while keep:
                start = content.rfind(b"\n", 0, keep - 1) + 1
                found = _LINE.match(content[start : start + _LINE_HEAD])
                if found is None:
                    raise _foreign(self._path, start)
                last = int(found[1])
                if last < last_step or (last == last_step and found[2] == b"rows"):
                    break  # marks at the very step are made anew from the state that is loaded
                keep, last = start, 0
        return keep, last


def logged_step(step: PlannedStep, sources: Sequence[SourceIndex]) -> dict[str, Any]:
    """What the log says of a step: its samples by row, its tokens by source."""
    tokens: Counter[str] = Counter()
    rows: list[list[Use]] = []
    for row in step.rows:
        rows.append([])
        for sample in row:
            source = sources[sample.source]
            rows[-1].append([source.name, sample.epoch, source.index.shards.names[sample.shard], sample.row])
            tokens[source.name] += sample.length
    return {"rows": rows, "tokens": dict(tokens)}


def read_log(path: Path) -> Iterator[AuditLine]:
    """The whole lines of a log, one by one.

    Raises:
        DataError: There is no such file, or a line is none of an audit log.
    """
    offset = 0
    try:
        with open(path, "rb") as file:
            for text in file:
                if not text.endswith(b"\n"):
                    return  # cut off by a kill, or being written now
                yield _parse(path, offset, text)
                offset += len(text)
    except OSError as error:
        raise _unreadable(path, error) from error


def count_lines(path: Path) -> tuple[int, int]:
    """(steps, marks) of a log, without reading what they hold.

    Raises:
        DataError: There is no such file.
    """
    counts = [0, 0]
    try:
        with open(path, "rb") as file:
            for text in file:
                found = _LINE.match(text[:_LINE_HEAD])
                if found is not None and text.endswith(b"\n"):
                    counts[found[2] != b"rows"] += 1
    except OSError as error:
        raise _unreadable(path, error) from error
    return counts[0], counts[1]


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _parse(path: Path, offset: int, text: bytes) -> AuditLine:
    found = _LINE.match(text[:_LINE_HEAD])
    if found is None:
        raise _foreign(path, offset)
    try:
        line = json.loads(text)
        kind: Any = found[2].decode()
        if kind == "rows":
            return AuditLine(step=line["step"], kind=kind, rows=line["rows"], tokens=line["tokens"], when=line["when"])
        change = line["change"] if kind == "change" else {}
        place = {name: line[name] for name in ("plan", "sources", "when")}
        return AuditLine(step=line["step"], kind=kind, change=change, **place)
    except (ValueError, KeyError) as error:
        raise DataError(
            f"line of an audit log is damaged ({error}). {path} at byte {offset}. Restore the file from a copy."
        ) from error


def _plan_id(line: bytes) -> Any:
    """What the line of step 1 says of its plan; None where it says nothing."""
    try:
        return json.loads(line).get("plan_id")
    except ValueError:
        return None


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"audit log cannot be read: {error.strerror}. {path}. Name the folder or log of a run.")


def _foreign(path: Path, offset: int) -> DataError:
    return DataError(f"line is no step of an audit log. {path} at byte {offset}. Name another file as data.audit_log.")
