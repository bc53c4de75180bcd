# SPDX-License-Identifier: Apache-2.0
"""Write the audit log: one JSON line for every step, in order, saying which samples it consumed.

Used by the loader of the first data-parallel rank; audit_lines.py reads what is written here, log_parts.py keeps the
files. Besides steps a log can hold marks, which stand after the step they name and carry the data order's state there:
the data changed and somebody accepted it, the run was branched off another one whose log holds the steps before, or a
new part begins.
"""

import hashlib
import json
import logging
import mmap
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mindvl_data import log_parts
from mindvl_data.audit_lines import LINE, LINE_HEAD, LINE_START, Use, count_lines, not_a_line
from mindvl_data.errors import DataError
from mindvl_data.log_file import LogFile
from mindvl_data.log_parts import as_line, closed_parts, lines_of, log_files, next_path, part_path
from mindvl_data.order.data_order import OrderedStep
from mindvl_data.order.sources import SourceIndex
from mindvl_data.state_check import pack_samples

logger = logging.getLogger(__name__)

_PATIENCE_S = 10.0  # how long closing waits for a part that is being compressed


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
        self._order_id = hashlib.sha256(json.dumps(identities, sort_keys=True).encode()).hexdigest()[:16]
        self._quarantine = dict(quarantine or {})
        self._is_fresh = True  # nothing was recorded since the log was opened
        self._compressing: threading.Thread | None = None
        if not LINE_START.startswith(self._file.head(len(LINE_START))):
            raise not_a_line(f"{path}:1", self._file.head(LINE_HEAD))

    def record(self, step: OrderedStep) -> None:
        """Write the step's samples by pack.

        Raises:
            DataError: The line cannot be written, and nothing of it was; the step can be recorded again. Or the run
                starts anew, but the log holds what it would not log again.
        """
        if self._is_fresh:
            self._start_anew()
        more: dict[str, Any] = {"order_id": self._order_id} if step.step == 1 else {}
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
        order: dict[str, Any],
        changes: Sequence[dict[str, Any]],
        *,
        parent: str | None = None,
        quarantine: Mapping[str, int] | None = None,
    ) -> None:
        """Continue after `step`: drop the lines after it, and mark what the steps alone would not explain.

        Args:
            order: State of the data order after `step`, as it continues from there.
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
        place = {"order": order, "sources": [source.name for source in self._sources]}
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

    def _close_part(self, step: OrderedStep) -> None:
        """Begin a new part; where that fails the old one grows on, and the next step tries again."""
        number = len(closed_parts(self._path)) + 1
        header = {
            "step": step.step,
            "part": number,
            "order": {**step.state_after, "buffer": pack_samples(step.state_after["buffer"])},
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
        if first.endswith(b"\n") and (_order_id(first) != self._order_id or count_lines(self._path)[1]):
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
                matched = LINE.match(text[:LINE_HEAD])
                if matched is None:
                    raise not_a_line(f"{closed[number - 1]}:{line_number}", text)
                step = int(matched[1])
                if step > last_step or (step == last_step and matched[2] not in (b"packs", b"part")):
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
                text = content[start : start + LINE_HEAD]
                found = LINE.match(text)
                if found is None and content[start:keep] != log_parts.empty_log_line():
                    number = content[:start].count(b"\n") + 1
                    raise not_a_line(f"{self._path}:{number}", text)
                last = int(found[1]) if found else 0
                if last < last_step or (last == last_step and (found is None or found[2] in (b"packs", b"part"))):
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


def logged_step(step: OrderedStep, sources: Sequence[SourceIndex]) -> dict[str, Any]:
    """What the log says of a step: its samples by pack, its tokens by source."""
    tokens: Counter[str] = Counter()
    packs: list[list[Use]] = []
    for pack in step.packs:
        packs.append([])
        for sample in pack:
            source = sources[sample.source]
            packs[-1].append([source.name, sample.epoch, source.index.shards.names[sample.shard], sample.sample_index])
            tokens[source.name] += sample.length
    return {"packs": packs, "tokens": dict(tokens)}


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _order_id(line: bytes) -> Any:
    """What the line of step 1 says of its plan; None where it says nothing."""
    try:
        return json.loads(line).get("order_id")
    except (ValueError, AttributeError, RecursionError):
        return None
