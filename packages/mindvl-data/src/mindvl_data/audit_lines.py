# SPDX-License-Identifier: Apache-2.0
"""Read the audit log line by line with bounded memory, and refuse lines that no loader writes.

audit_log.py writes the log; the ledger uses this module to read it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mindvl_data import log_parts
from mindvl_data.errors import DataError
from mindvl_data.log_parts import lines_of, log_files, next_path
from mindvl_data.state_check import check_change, check_order, unpack_samples

Use = list[Any]  # [source, epoch, shard, sample_index]

LINE_START = b'{"step":'
LINE = re.compile(rb'\{"step":(\d{1,18}),"(packs|change|branch|part)":')
LINE_HEAD = 48  # bytes; the step number and the kind of a line always fit
_FORMER_STEP = re.compile(rb'\{"step":\d{1,18},"rows":')
_LARGEST = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditLine:
    """One line of a log."""

    step: int
    kind: Literal["packs", "change", "branch", "part"]
    when: str  # UTC, to the second
    where: str  # file:line
    packs: list[list[Use]] = field(default_factory=list)  # of a step
    tokens: dict[str, int] = field(default_factory=dict)  # of a step, by source
    before: dict[str, int] = field(default_factory=dict)  # of a step: bytes of quarantine logs when the run started
    change: dict[str, Any] = field(default_factory=dict)  # of a change: user and sources, as in the ledger state
    order: dict[str, Any] = field(default_factory=dict)  # of a mark: the state from which the data order continues
    sources: list[str] = field(default_factory=list)  # of a mark: names of the sources, in the order of the state
    branch: int = 0  # of a branch: the last step before it in this log
    parent: str | None = None  # of a branch: the audit log of the earlier steps, relative to this log's directory


def read_log(path: Path) -> Iterator[AuditLine]:
    """Yield the complete lines of a log, over all its parts.

    Raises:
        DataError: The file or a part does not exist, or a line is not part of an audit log.
    """
    for file in log_files(path):
        yield from read_part(file, is_closed=is_closed(path, file))


def is_closed(log: Path, file: Path) -> bool:
    """Whether a file of a log is a closed part, in which no line is truncated."""
    return file not in (log, next_path(log))


def read_part(file: Path, *, is_closed: bool, only_marks: bool = False) -> Iterator[AuditLine]:
    """Yield the lines of one file of a log.

    Args:
        only_marks: Skip steps without parsing them.

    Raises:
        DataError: See read_log.
    """
    for number, text in lines_of(file, may_be_cut_off=not is_closed):
        if text == log_parts.empty_log_line():
            continue
        if only_marks and (found := LINE.match(text[:LINE_HEAD])) and found[2] == b"packs":
            continue
        yield _parse(f"{file}:{number}", text)


def count_lines(path: Path) -> tuple[int, int]:
    """Return the number of (steps, marks) of a log without parsing them; headers of parts are neither.

    Raises:
        DataError: The file does not exist.
    """
    counts = Counter[bytes]()
    for file in log_files(path):
        for _, text in lines_of(file, may_be_cut_off=not is_closed(path, file)):
            found = LINE.match(text[:LINE_HEAD])
            if found is not None:
                counts[found[2]] += 1
    return counts[b"packs"], counts[b"change"] + counts[b"branch"]


def not_a_line(where: str, text: bytes) -> DataError:
    """The error for a line that this version did not write."""
    if _FORMER_STEP.match(text[:LINE_HEAD]):
        return _former_version(where)
    return DataError(f"{where}: the line is not part of an audit log. Set another file as data.audit_log.")


def _parse(where: str, text: bytes) -> AuditLine:
    found = LINE.match(text[:LINE_HEAD])
    if found is None:
        raise not_a_line(where, text)
    try:
        line = json.loads(text)
        kind: Any = found[2].decode()
        if kind != "packs" and "plan" in line:
            raise _former_version(where)
        if line["step"] != int(found[1]) or type(line["when"]) is not str:
            raise ValueError(
                f"step and when: must be {int(found[1])} and a string, got {line['step']!r:.40}, {line['when']!r:.40}"
            )
        if kind == "packs":
            _check_step(line)
            return AuditLine(
                step=line["step"], kind=kind, where=where, when=line["when"], packs=line["packs"],
                tokens=line["tokens"], before=line.get("before", {}),
            )  # fmt: skip
        return _mark(line, kind, where)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{where}: the line of the audit log is damaged ({type(error).__name__}: {str(error)[:200]}). "
            "Restore the file from a copy."
        ) from error


def _former_version(where: str) -> DataError:
    return DataError(
        f"{where}: the audit log was written by an earlier mindvl-data (with ledger state version 2 or older). Read it "
        "or resume its run with that version, or set another data.audit_log."
    )


def _check_step(line: dict[str, Any]) -> None:
    """Raise ValueError or TypeError if no loader writes such a step."""
    for pack in line["packs"]:
        for source, epoch, shard, number in pack:
            if not (
                type(source) is type(shard) is str
                and type(epoch) is type(number) is int
                and 0 <= epoch < _LARGEST
                and 0 <= number < _LARGEST
            ):
                raise ValueError(f"packs: must be lists of samples, got {str([source, epoch, shard, number])[:80]}")
    for counted in (line["tokens"], line.get("before", {})):
        if type(counted) is not dict or any(type(n) is not int or not 0 <= n < _LARGEST for n in counted.values()):
            raise ValueError(f"tokens and before: must be objects of counts, got {str(counted)[:80]}")


def _mark(line: dict[str, Any], kind: Any, where: str) -> AuditLine:
    sources = line["sources"]
    if type(sources) is not list or any(type(name) is not str for name in sources):
        raise ValueError(f"sources: must be a list of names, got {str(sources)[:80]}")
    order = line["order"]
    if isinstance(order, dict) and isinstance(order.get("buffer"), str):
        order = order | {"buffer": unpack_samples(order["buffer"])}
    check_order(order, num_sources=len(sources))
    branch, change, parent = 0, {}, line.get("parent")
    if kind == "branch":
        branch = line["branch"]
        if type(branch) is not int or not 0 <= branch < line["step"] or not isinstance(parent, str | None):
            raise ValueError(
                f"branch: must be a step before {line['step']} with a parent or null, got {str(branch)[:20]}"
            )
    if kind == "change":
        change = line["change"]
        check_change(change)
    return AuditLine(
        step=line["step"], kind=kind, where=where, when=line["when"], change=change, order=order, sources=sources,
        branch=branch, parent=parent,
    )  # fmt: skip
