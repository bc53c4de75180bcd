# SPDX-License-Identifier: Apache-2.0
"""The audit log: one JSON line for every step, in order, saying which samples it consumed.

Written by the loader of the first data-parallel rank, read by ledger.py; log_parts.py keeps its files. Besides steps a
log can hold marks, which stand after the step they name and carry the data order's state there: the data changed and
somebody accepted it, the run was branched off another one whose log holds the steps before, or a new part begins.
"""

import hashlib
import json
import logging
import mmap
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from mindvl_data import log_parts
from mindvl_data.errors import DataError
from mindvl_data.log_file import LogFile
from mindvl_data.log_parts import as_line, closed_parts, lines_of, log_files, next_path, part_path
from mindvl_data.plan.planner import PlannedStep
from mindvl_data.plan.sources import SourceIndex
from mindvl_data.state_check import check_change, check_plan, pack_samples, unpack_samples

logger = logging.getLogger(__name__)

Use = list[Any]  # [source, epoch, shard, row in shard]

_LINE_START = b'{"step":'
_LINE = re.compile(rb'\{"step":(\d{1,18}),"(rows|change|branch|part)":')
_LINE_HEAD = 48  # bytes; more than the step's number and the kind of line can take
_LARGEST = 1 << 62
_PATIENCE_S = 10.0  # how long closing waits for a part that is being compressed


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditLine:
    """One line of a log."""

    step: int
    kind: Literal["rows", "change", "branch", "part"]
    when: str  # UTC, to the second
    where: str  # file:line
    rows: list[list[Use]] = field(default_factory=list)  # of a step
    tokens: dict[str, int] = field(default_factory=dict)  # of a step, by source
    before: dict[str, int] = field(default_factory=dict)  # of a step: bytes of quarantine logs at the start
    change: dict[str, Any] = field(default_factory=dict)  # of a change: who, and what, as the ledger state keeps it
    plan: dict[str, Any] = field(default_factory=dict)  # of a mark: the state the data order continues from
    sources: list[str] = field(default_factory=list)  # of a mark: the sources that the state counts
    branch: int = 0  # of a branch: the last step before it that this log holds
    parent: str | None = None  # of a branch: the audit log with the steps before, relative to this one's directory


class AuditLog:
    """Appends lines. What a stopped run logged beyond the step that its successor starts from is dropped.

    So each step stands there once, in order; a last line cut off by a kill is dropped too. Nothing is dropped before
    the first write, and a run that starts anew drops only what it is going to log again.

    Args:
        identities: As in the ledger state. Their hash stands in the line of step 1.
        quarantine: Bytes in each quarantine log when this run began.

    Raises:
        DataError: The file holds something other than an audit log, or cannot be written.
    """

    def __init__(
        self,
        path: Path,
        sources: Sequence[SourceIndex],
        identities: dict[str, str],
        quarantine: Mapping[str, int] | None = None,
    ) -> None:
        self._path = path
        if not path.exists() and closed_parts(path) and next_path(path).exists():
            next_path(path).rename(path)  # killed between the two renames of a rotation
        self._file = LogFile(path, "audit")
        self._sources = sources
        self._plan_id = hashlib.sha256(json.dumps(identities, sort_keys=True).encode()).hexdigest()[:16]
        self._quarantine = dict(quarantine or {})
        self._is_fresh = True  # nothing was recorded since the log was opened
        self._compressing: threading.Thread | None = None
        if not _LINE_START.startswith(self._file.head(len(_LINE_START))):
            raise _foreign(path, 1)

    def record(self, step: PlannedStep) -> None:
        """Write the step's samples by row.

        Raises:
            DataError: The line cannot be written, and nothing of it was; the step can be recorded again. Or the run
                starts anew, but the log holds what it would not log again.
        """
        if self._is_fresh:
            self._start_anew()
        more: dict[str, Any] = {"plan_id": self._plan_id} if step.step == 1 else {}
        if self._quarantine:
            more["before"] = self._quarantine
        self._append({"step": step.step, **logged_step(step, self._sources), **more})
        self._quarantine = {}
        if self._file.size() >= log_parts.PART_BYTES:
            self._close_part(step)

    def claim(self, step: int) -> None:
        """Be the only writer, and check that the log can continue after `step`; nothing in the file is changed.

        Raises:
            DataError: Another loader writes it, or it holds something other than an audit log.
        """
        self._file.lock()
        self._find(step)

    def resume(
        self,
        step: int,
        plan: dict[str, Any],
        changes: Sequence[dict[str, Any]],
        *,
        parent: str | None = None,
        quarantine: Mapping[str, int] | None = None,
    ) -> None:
        """Continue after `step`: drop the lines after it, and mark what the steps alone would not explain.

        Args:
            plan: The plan's state after `step`, as it continues from there.
            changes: All data changes that were accepted so far, each with the step it follows.
            parent: The audit log of the run whose checkpoint is continued, relative to this log's directory.
            quarantine: Bytes in each quarantine log: what they say of later steps is of an earlier try.

        Raises:
            DataError: As `claim`, or the log cannot be written.
        """
        self.claim(step)
        found = self._find(step)
        if found.part is None:
            self._file.cut(found.size)
        else:
            self._reopen(found)
        self._is_fresh, self._quarantine = False, dict(quarantine or {})
        place = {"plan": plan, "sources": [source.name for source in self._sources]}
        if found.last < step:
            own = parent is not None and (self._path.parent / parent).resolve() == self._path.resolve()
            named = {} if parent is None or own else {"parent": parent}
            self._append({"step": step, "branch": found.last, **named, **place})
        for change in changes:
            if change["step"] == step:
                self._append({"step": step, "change": change, **place})

    def sync(self) -> None:
        """Have it on disk before a checkpoint says that the steps were done."""
        self._file.sync()

    def close(self) -> None:
        """Close the file; a part that is being compressed is waited for, but not for long."""
        if self._compressing is not None:
            self._compressing.join(_PATIENCE_S)
        self._file.close()

    def _append(self, line: dict[str, Any]) -> None:
        line["when"] = now()
        self._file.append(line)

    def _close_part(self, step: PlannedStep) -> None:
        """Begin a new part; where that fails the old one grows on, and the next step tries again."""
        number = len(closed_parts(self._path)) + 1
        header = {
            "step": step.step,
            "part": number,
            "plan": {**step.state_after, "buffer": pack_samples(step.state_after["buffer"])},
            "sources": [source.name for source in self._sources],
            "when": now(),
        }
        try:
            self._file.replace(next_path(self._path), [as_line(header)], keep_as=part_path(self._path, number))
        except DataError as error:
            logger.warning("%s The log stays in one part for now.", error)
            return
        self._wait()
        self._compressing = threading.Thread(
            target=log_parts.compress_closed, args=(self._path,), name="mindvl-audit", daemon=True
        )
        self._compressing.start()

    def _wait(self) -> None:
        if self._compressing is not None:
            self._compressing.join()
            self._compressing = None

    def _start_anew(self) -> None:
        """Drop what a run of the very same plan logged before it had a checkpoint; refuse to drop anything else."""
        self._file.lock()
        closed = closed_parts(self._path)
        with log_parts.open_part(closed[0] if closed else self._path) as file:
            first = file.readline(log_parts.MAX_LINE_BYTES)
            if first == log_parts.empty_log_line():
                first = file.readline(log_parts.MAX_LINE_BYTES)
        if first.endswith(b"\n") and (_plan_id(first) != self._plan_id or count_lines(self._path)[1]):
            raise DataError(
                f"audit log holds steps that this run would not log again, as it starts anew. {self._path}. "
                "Resume the run that wrote it, name another data.audit_log, or remove the file."
            )
        if closed:
            self._reopen(_Place(part=1, size=0, last=0))
        else:
            self._file.cut(0)
        self._is_fresh = False

    def _find(self, last_step: int) -> "_Place":
        """The end of the whole lines up to `last_step`, without marks there."""
        closed = closed_parts(self._path)
        if not closed or log_files(self._path)[-1] == self._path:
            found = self._find_in_newest(last_step)
            if found.size or not closed:
                return found
        for number in range(len(closed), 0, -1):
            size, last = 0, 0
            for line_number, text in lines_of(closed[number - 1], may_be_cut_off=False):
                matched = _LINE.match(text[:_LINE_HEAD])
                if matched is None:
                    raise _foreign(closed[number - 1], line_number)
                step = int(matched[1])
                if step > last_step or (step == last_step and matched[2] not in (b"rows", b"part")):
                    break
                size, last = size + len(text), step
            if size:
                return _Place(part=number, size=size, last=last)
        return _Place(part=1, size=0, last=0)

    def _find_in_newest(self, last_step: int) -> "_Place":
        """The same in the file that is written; from its end, because that is near."""
        if not self._file.size():
            return _Place(part=None, size=0, last=0)  # an empty file cannot be mapped
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            keep, last = content.rfind(b"\n") + 1, 0
            while keep:
                start = content.rfind(b"\n", 0, keep - 1) + 1
                text = content[start : start + _LINE_HEAD]
                found = _LINE.match(text)
                if found is None and not content[start:keep] == log_parts.empty_log_line():
                    raise _foreign(self._path, content[:start].count(b"\n") + 1)
                last = int(found[1]) if found else 0
                if last < last_step or (last == last_step and (found is None or found[2] in (b"rows", b"part"))):
                    break  # marks at the very step are made anew from the state that is loaded
                keep, last = start, 0
        return _Place(part=None, size=keep, last=last)

    def _reopen(self, place: "_Place") -> None:
        """Have the beginning of a closed part as the newest file, and nothing after it."""
        assert place.part is not None
        self._wait()
        part = closed_parts(self._path)[place.part - 1]
        content = _beginning(part, place.size) if place.size else [log_parts.empty_log_line()]
        self._file.replace(next_path(self._path), content)
        try:
            log_parts.remove_closed(self._path, place.part)
        except OSError as error:
            raise DataError(
                f"{self._path}: a closed part of the audit log cannot be removed ({error.strerror}). "
                "Make the directory writable."
            ) from error


@dataclass(frozen=True, kw_only=True)
class _Place:
    part: int | None  # a closed one; None: the newest file
    size: int  # bytes of it that stay
    last: int  # step of the last line in them


def _beginning(part: Path, size: int) -> Iterator[bytes]:
    with log_parts.open_part(part) as file:
        while size and (piece := file.read(min(size, 1 << 20))):
            size -= len(piece)
            yield piece


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
    """The whole lines of a log, one by one, over all its parts.

    Raises:
        DataError: There is no such file, a part is missing, or a line is none of an audit log.
    """
    for file in log_files(path):
        yield from read_part(file, is_closed=is_closed(path, file))


def is_closed(log: Path, file: Path) -> bool:
    """Whether a file of a log is a closed part, in which no line is cut off."""
    return file not in (log, next_path(log))


def read_part(file: Path, *, is_closed: bool, only_marks: bool = False) -> Iterator[AuditLine]:
    """The lines of one file of a log.

    Args:
        only_marks: Steps are passed over without reading what they hold.

    Raises:
        DataError: As read_log.
    """
    for number, text in lines_of(file, may_be_cut_off=not is_closed):
        if text == log_parts.empty_log_line():
            continue
        if only_marks and (found := _LINE.match(text[:_LINE_HEAD])) and found[2] == b"rows":
            continue
        yield _parse(f"{file}:{number}", text)


def count_lines(path: Path) -> tuple[int, int]:
    """(steps, marks) of a log, without reading what they hold; headers of parts are neither.

    Raises:
        DataError: There is no such file.
    """
    counts = Counter[bytes]()
    for file in log_files(path):
        for _, text in lines_of(file, may_be_cut_off=not is_closed(path, file)):
            found = _LINE.match(text[:_LINE_HEAD])
            if found is not None:
                counts[found[2]] += 1
    return counts[b"rows"], counts[b"change"] + counts[b"branch"]


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _parse(where: str, text: bytes) -> AuditLine:
    found = _LINE.match(text[:_LINE_HEAD])
    if found is None:
        raise DataError(f"{where}: line is no step of an audit log. Name another file as data.audit_log.")
    try:
        line = json.loads(text)
        kind: Any = found[2].decode()
        if line["step"] != int(found[1]) or type(line["when"]) is not str:
            raise ValueError("step or time is given twice, or is no step or time")
        if kind == "rows":
            _check_step(line)
            return AuditLine(
                step=line["step"], kind=kind, where=where, when=line["when"], rows=line["rows"],
                tokens=line["tokens"], before=line.get("before", {}),
            )  # fmt: skip
        return _mark(line, kind, where)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{where}: line of an audit log is damaged ({type(error).__name__}: {str(error)[:200]}). "
            "Restore the file from a copy."
        ) from error


def _check_step(line: dict[str, Any]) -> None:
    """Raise ValueError or TypeError for a step that no loader writes."""
    for row in line["rows"]:
        for source, epoch, shard, number in row:
            if not (
                type(source) is type(shard) is str
                and type(epoch) is type(number) is int
                and 0 <= epoch < _LARGEST
                and 0 <= number < _LARGEST
            ):
                raise ValueError(f"{str([source, epoch, shard, number])[:80]} is no sample")
    for counted in (line["tokens"], line.get("before", {})):
        if type(counted) is not dict or any(type(n) is not int or not 0 <= n < _LARGEST for n in counted.values()):
            raise ValueError(f"{str(counted)[:80]} are no counts")


def _mark(line: dict[str, Any], kind: Any, where: str) -> AuditLine:
    sources = line["sources"]
    if type(sources) is not list or any(type(name) is not str for name in sources):
        raise ValueError("sources are no names")
    plan = line["plan"]
    if isinstance(plan.get("buffer"), str):
        plan = plan | {"buffer": unpack_samples(plan["buffer"])}
    check_plan(plan, num_sources=len(sources))
    branch, change, parent = 0, {}, line.get("parent")
    if kind == "branch":
        branch = line["branch"]
        if type(branch) is not int or not 0 <= branch < line["step"] or not isinstance(parent, str | None):
            raise ValueError(f"branch after {str(branch)[:20]}")
    if kind == "change":
        change = line["change"]
        check_change(change)
    return AuditLine(
        step=line["step"], kind=kind, where=where, when=line["when"], change=change, plan=plan, sources=sources,
        branch=branch, parent=parent,
    )  # fmt: skip


def _plan_id(line: bytes) -> Any:
    """What the line of step 1 says of its plan; None where it says nothing."""
    try:
        return json.loads(line).get("plan_id")
    except (ValueError, AttributeError, RecursionError):
        return None


def _foreign(path: Path, number: int) -> DataError:
    return DataError(f"{path}:{number}: line is no step of an audit log. Name another file as data.audit_log.")
