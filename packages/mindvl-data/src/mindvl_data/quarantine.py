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

from mindvl_data.log_file import LogFile


@dataclass(frozen=True, kw_only=True)
class BadUse:
    """A bad sample where it was planned to be used; a placeholder took its place."""

    step: int
    source: str
    shard: str
    row: int  # position inside the shard
    key: str
    reason: str


class QuarantineLog:
    """Appends one JSON line for every bad sample that was handed out; the file appears with the first one.

    Args:
        path: The log of a run; the number of the rank goes before its suffix: `quarantine.rank00003.jsonl`.
    """

    def __init__(self, path: Path, *, dp_rank: int) -> None:
        self._path = path.with_name(f"{path.stem}.rank{dp_rank:05d}{path.suffix}")
        self._file: LogFile | None = None

    def record(self, bad: BadUse) -> None:
        """Write one line.

        Raises:
            DataError: It cannot be written, and nothing of it was.
        """
        if self._file is None:
            file = LogFile(self._path, "quarantine")
            file.end_line()
            self._file = file
        self._file.append(asdict(bad))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_quarantine(path: Path) -> Iterator[BadUse]:
    """Every bad sample of a run once, over all ranks and restarts: its first use. Lines cut off by a kill are left out.

    Args:
        path: As given to QuarantineLog.
    """
    seen = set()
    for file in sorted(path.parent.glob(f"{path.stem}.rank*{path.suffix}")):
        with open(file, "rb") as lines:
            for line in lines:
                try:
                    bad = BadUse(**json.loads(line))
                except (ValueError, TypeError):
                    continue
                if (bad.source, bad.shard, bad.row) not in seen:
                    seen.add((bad.source, bad.shard, bad.row))
                    yield bad
