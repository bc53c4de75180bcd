# SPDX-License-Identifier: Apache-2.0
"""The quarantine log: which samples could not be used at run time, and why.

Stands beside the loader. Each data-parallel rank appends to a file of its own, a line for every use of a bad sample.
The files are never shortened: a sample that was bad stays bad whichever checkpoint a run goes back to. Readers count
each sample once.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mindvl_data.errors import DataError
from mindvl_data.log_file import LogFile
from mindvl_data.log_parts import lines_of

FAILED_ELSEWHERE = "a process that trains the same pack cannot use it"  # the reason where only a peer met the damage


@dataclass(frozen=True, kw_only=True)
class FailedSample:
    """A bad sample where it was planned to be used; a placeholder took its place."""

    step: int
    source: str
    shard: str
    sample_index: int  # position inside the shard
    key: str
    reason: str
    epoch: int | None = None  # None in logs of older versions

    def __post_init__(self) -> None:
        whole = (self.step, self.sample_index, self.epoch or 0)
        texts = (self.source, self.shard, self.key, self.reason)
        if any(type(number) is not int or number < 0 for number in whole) or any(type(t) is not str for t in texts):
            raise TypeError("a field is of another type")


@dataclass(frozen=True, kw_only=True)
class LoggedUse:
    """A line of a quarantine log."""

    sample: FailedSample
    file: str  # name of the log of its rank
    line: int
    offset: int  # byte at which the line begins


class QuarantineLog:
    """Appends one JSON line for every bad sample that was handed out; the file appears with the first one.

    Args:
        path: The log of a run; the number of the rank goes before its suffix: `quarantine.rank00003.jsonl`.
    """

    def __init__(self, path: Path, *, dp_rank: int) -> None:
        self._path = path.with_name(f"{path.stem}.rank{dp_rank:05d}{path.suffix}")
        self._file: LogFile | None = None

    def record(self, sample: FailedSample) -> None:
        """Write one line.

        Raises:
            DataError: It cannot be written, and nothing of it was.
        """
        if self._file is None:
            file = LogFile(self._path, "quarantine")
            file.end_line()
            self._file = file
        self._file.append(asdict(sample))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def quarantine_sizes(path: Path | None) -> dict[str, int]:
    """Bytes in the logs of all ranks by file name; empty ones are left out.

    Args:
        path: As given to QuarantineLog.
    """
    files = [] if path is None else sorted(path.parent.glob(f"{path.stem}.rank*{path.suffix}"))
    return {file.name: size for file in files if (size := file.stat().st_size)}


def read_uses(path: Path) -> Iterator[LoggedUse]:
    """Every line of the logs of all ranks. Lines that a kill cut off are passed over.

    Args:
        path: As given to QuarantineLog.

    Raises:
        DataError: A line is no line of a quarantine log.
    """
    for file in sorted(path.parent.glob(f"{path.stem}.rank*{path.suffix}")):
        offset = 0
        for number, text in lines_of(file, may_be_cut_off=True):
            try:
                sample = FailedSample(**json.loads(text))
            except (ValueError, TypeError, RecursionError) as error:
                if not text.rstrip().endswith(b"}"):  # cut off by a kill, and ended by the next start
                    offset += len(text)
                    continue
                raise DataError(
                    f"{file}:{number}: line of a quarantine log is damaged ({type(error).__name__}: "
                    f"{str(error)[:200]}). Restore the file from a copy."
                ) from error
            yield LoggedUse(sample=sample, file=file.name, line=number, offset=offset)
            offset += len(text)


def read_quarantine(path: Path) -> Iterator[FailedSample]:
    """Every bad sample of a run once, over all ranks and restarts: its first use.

    Args:
        path: As given to QuarantineLog.

    Raises:
        DataError: As read_uses.
    """
    seen = set()
    for use in read_uses(path):
        sample = use.sample
        if (sample.source, sample.shard, sample.sample_index) not in seen:
            seen.add((sample.source, sample.shard, sample.sample_index))
            yield sample
