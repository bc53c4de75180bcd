# SPDX-License-Identifier: Apache-2.0
"""Write the audit log: one JSON line per step, in order, with the samples that the step consumed.

Used by the loader of data-parallel rank 0; audit_lines.py reads the log, log_parts.py manages its files. A log also
contains marks, each after the step it names and with the state of the data order there: a user accepted changed data,
the run was branched from another run whose log holds the earlier steps, or a new part begins.
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

_JOIN_TIMEOUT_S = 10.0  # wait of `close` for a part that is being compressed


class AuditLog:
    """Appends lines, and on resume drops the lines after the step at which the run resumes.

    So each step is in the log once and in order; a last line truncated by a kill is dropped too. Nothing is dropped
    before the first write. A run that starts from step 1 drops only lines that it will log again.

    Args:
        identities: The identities of the ledger state. Their hash is in the line of step 1.
        quarantine: Size in bytes of each quarantine log when this run started.

    Raises:
        DataError: The file is not an audit log, or cannot be written.
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
        """Write the samples of a step by pack.

        Raises:
            DataError: The line cannot be written; no part of it remains, and the step can be recorded again. Or the run
                starts from step 1, but the log holds steps of another run.
        """
        if self._is_fresh:
            self._start_from_first_step()
        more: dict[str, Any] = {"order_id": self._order_id} if step.step == 1 else {}
        if self._quarantine:
            more["before"] = self._quarantine
        self._append({"step": step.step, **logged_step(step, self._sources), **more})
        self._quarantine = {}
        if self._file.size() >= log_parts.PART_BYTES:
            self._close_part(step)

    def claim(self, step: int) -> None:
        """Lock the log for writing and check that it can continue after `step`; the file is not changed.

        Raises:
            DataError: Another loader writes the log, or it is not an audit log.
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
        """Continue after `step`: drop the lines after it, and add marks for a branch and for changed data.

        Args:
            order: State of the data order after `step`, from which it continues.
            changes: All data changes accepted so far, each with the step it follows.
            parent: Audit log of the run whose checkpoint is resumed, relative to this log's directory.
            quarantine: Size in bytes of each quarantine log: their lines of later steps belong to an earlier attempt.

        Raises:
            DataError: See `claim`, or the log cannot be written.
        """
        self.claim(step)
        found = self._find(step)
        if found.part is None:
            self._file.cut(found.size)
        else:
            self._reopen(found)
        self._is_fresh, self._quarantine = False, dict(quarantine or {})
        state = {"order": order, "sources": [source.name for source in self._sources]}
        if found.last < step:
            own = parent is not None and (self._path.parent / parent).resolve() == self._path.resolve()
            named = {} if parent is None or own else {"parent": parent}
            self._append({"step": step, "branch": found.last, **named, **state})
        for change in changes:
            if change["step"] == step:
                self._append({"step": step, "change": change, **state})

    def sync(self) -> None:
        """Write the log to disk; called before a checkpoint records the steps as done."""
        self._file.sync()

    def close(self) -> None:
        """Close the file; waits a few seconds at most for a part that is being compressed."""
        if self._compressing is not None:
            self._compressing.join(_JOIN_TIMEOUT_S)
        self._file.close()

    def _append(self, line: dict[str, Any]) -> None:
        line["when"] = now()
        self._file.append(line)

    def _close_part(self, step: OrderedStep) -> None:
        """Begin a new part; on failure the old part is continued and the next step tries again."""
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
            logger.warning("%s The current part of the log is continued.", error)
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

    def _start_from_first_step(self) -> None:
        """Drop the lines of a run with the same data order that has no checkpoint yet; refuse to drop any others."""
        self._file.lock()
        closed = closed_parts(self._path)
        with log_parts.open_part(closed[0] if closed else self._path) as file:
            first = file.readline(log_parts.MAX_LINE_BYTES)
            if first == log_parts.empty_log_line():
                first = file.readline(log_parts.MAX_LINE_BYTES)
        if first.endswith(b"\n") and (_order_id(first) != self._order_id or count_lines(self._path)[1]):
            raise DataError(
                f"{self._path}: the audit log holds steps of another run, and this run starts from step 1. "
                "Resume the run that wrote it, set another data.audit_log, or remove the file."
            )
        if closed:
            self._reopen(_Position(part=1, size=0, last=0))
        else:
            self._file.cut(0)
        self._is_fresh = False

    def _find(self, last_step: int) -> "_Position":
        """The end of the complete lines up to `last_step`, without marks after it."""
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
                return _Position(part=number, size=size, last=last)
        return _Position(part=1, size=0, last=0)

    def _find_in_newest(self, last_step: int) -> "_Position":
        """The same in the newest file, searched backwards because the step is usually near its end."""
        if not self._file.size():
            return _Position(part=None, size=0, last=0)  # an empty file cannot be mapped
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
                    break  # marks at this step are written again from the loaded state
                keep, last = start, 0
        return _Position(part=None, size=keep, last=last)

    def _reopen(self, position: "_Position") -> None:
        """Make the beginning of a closed part the newest file, and remove everything after it."""
        assert position.part is not None
        self._wait()
        part = closed_parts(self._path)[position.part - 1]
        content = _beginning(part, position.size) if position.size else [log_parts.empty_log_line()]
        self._file.replace(next_path(self._path), content)
        try:
            log_parts.remove_closed(self._path, position.part)
        except OSError as error:
            raise DataError(
                f"{self._path}: a closed part of the audit log cannot be removed: {error.strerror}. "
                "Make the directory writable."
            ) from error


@dataclass(frozen=True, kw_only=True)
class _Position:
    part: int | None  # number of a closed part; None: the newest file
    size: int  # bytes of it that are kept
    last: int  # step of the last line kept


def _beginning(part: Path, size: int) -> Iterator[bytes]:
    with log_parts.open_part(part) as file:
        while size and (piece := file.read(min(size, 1 << 20))):
            size -= len(piece)
            yield piece


def logged_step(step: OrderedStep, sources: Sequence[SourceIndex]) -> dict[str, Any]:
    """The content of a step's line: its samples by pack, its tokens by source."""
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
    """The hash of the identities in the line of step 1; None if it has none."""
    try:
        return json.loads(line).get("order_id")
    except (ValueError, AttributeError, RecursionError):
        return None
