# SPDX-License-Identifier: Apache-2.0
"""The quarantine log: which samples failed to decode at run time, and why.

Written by the loader. Each data-parallel rank appends to its own file, one line per use of a failed sample. The files
are never truncated: a sample that failed fails again after a resume from any checkpoint. Readers count each sample once.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mindvl_data.errors import DataError
from mindvl_data.log_file import LogFile
from mindvl_data.log_parts import lines_of

# The reason where it did not fail here.
FAILED_ELSEWHERE = "failed to decode on another rank of the model-parallel group"


@dataclass(frozen=True, kw_only=True)
class FailedSample:
    """One use of a sample that failed to decode; a placeholder replaced it."""

    step: int
    source: str
    shard: str
    sample_index: int  # position inside the shard
    key: str
    reason: str
    epoch: int | None = None  # None in logs of earlier versions

    def __post_init__(self) -> None:
        whole = (self.step, self.sample_index, self.epoch or 0)
        texts = (self.source, self.shard, self.key, self.reason)
        if any(type(number) is not int or number < 0 for number in whole) or any(type(t) is not str for t in texts):
            raise TypeError("a field has the wrong type")


@dataclass(frozen=True, kw_only=True)
class LoggedUse:
    """A line of a quarantine log."""

    sample: FailedSample
    file: str  # name of the rank's log
    line: int
    offset: int  # of the first byte of the line


class QuarantineLog:
    """Appends one JSON line per failed sample; the file is created with the first one.

    Args:
        path: Log of the run; the rank is inserted before the suffix: `quarantine.rank00003.jsonl`.
    """

    def __init__(self, path: Path, *, dp_rank: int) -> None:
        self._path = path.with_name(f"{path.stem}.rank{dp_rank:05d}{path.suffix}")
        self._file: LogFile | None = None

    def record(self, sample: FailedSample) -> None:
        """Write one line.

        Raises:
            DataError: The line cannot be written; no part of it remains in the file.
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
    """Size in bytes of the log of each rank, by file name; empty logs are omitted.

    Args:
        path: The `path` of QuarantineLog.
    """
    files = [] if path is None else sorted(path.parent.glob(f"{path.stem}.rank*{path.suffix}"))
    return {file.name: size for file in files if (size := file.stat().st_size)}


def read_uses(path: Path) -> Iterator[LoggedUse]:
    """Yield every line of the logs of all ranks, except lines truncated by a kill.

    Args:
        path: The `path` of QuarantineLog.

    Raises:
        DataError: A line is not part of a quarantine log.
    """
    for file in sorted(path.parent.glob(f"{path.stem}.rank*{path.suffix}")):
        offset = 0
        for number, text in lines_of(file, may_be_cut_off=True):
            try:
                sample = FailedSample(**json.loads(text))
            except (ValueError, TypeError, RecursionError) as error:
                if not text.rstrip().endswith(b"}"):  # truncated by a kill, and terminated by the next start
                    offset += len(text)
                    continue
                raise DataError(
                    f"{file}:{number}: the line of the quarantine log is damaged ({type(error).__name__}: "
                    f"{str(error)[:200]}). Restore the file from a copy."
                ) from error
            yield LoggedUse(sample=sample, file=file.name, line=number, offset=offset)
            offset += len(text)


def read_quarantine(path: Path) -> Iterator[FailedSample]:
    """Yield the first use of every failed sample of a run, over all ranks and restarts.

    Args:
        path: The `path` of QuarantineLog.

    Raises:
        DataError: See read_uses.
    """
    seen = set()
    for use in read_uses(path):
        sample = use.sample
        if (sample.source, sample.shard, sample.sample_index) not in seen:
            seen.add((sample.source, sample.shard, sample.sample_index))
            yield sample
