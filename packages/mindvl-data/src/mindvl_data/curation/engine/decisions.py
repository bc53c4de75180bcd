# SPDX-License-Identifier: Apache-2.0
"""Decide a set step over the signatures of all parts, and keep the decisions by part.

Runs in the main process between two segments. Signatures are streamed from the files of the parts, so that they may be
larger than memory; decisions are collected in bounded memory and appended to a file per part.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mindvl_data.curation.engine.part_files import (
    SignatureBlock,
    part_name,
    read_signatures,
    signatures_path,
    to_json,
)
from mindvl_data.curation.step import Context, Decision, Drop, Step
from mindvl_data.errors import DataError

SHOWN_GROUPS = 12  # groups of duplicates that the page shows
GROUP_FACT = "duplicate_group"

_HELD = 200_000  # decisions in memory
_WANTED_NAME = "wanted.json"


class StoredSignatures:
    """The signatures of all parts of a segment, in input order.

    Args:
        directory: Directory of the segment.
        parts: Numbers of its parts.
    """

    def __init__(self, directory: Path, parts: Sequence[int]) -> None:
        self._paths = [signatures_path(directory, number) for number in sorted(parts)]
        self.width = 0
        self.num_rows = 0
        for path in self._paths:
            for numbers, _, signatures in read_signatures(path):
                if self.num_rows and signatures.shape[1] != self.width:
                    raise DataError(
                        f"{path}: signatures have {signatures.shape[1]} bytes and others {self.width}. Report this error: "
                        "the step must give signatures of one width."
                    )
                self.width, self.num_rows = signatures.shape[1], self.num_rows + len(numbers)

    def blocks(self) -> Iterator[SignatureBlock]:
        """Blocks in input order."""
        for path in self._paths:
            yield from read_signatures(path)


def decide(
    step: Step, parameters: Any, context: Context, segment: Path, parts: Sequence[int], out: Path
) -> frozenset[str]:
    """Run the decision of a set step and write its decisions to `out`, which exists only when they are complete.

    Returns:
        Values of the fact `duplicate_group` of the groups that the page shows.
    """
    if not out.is_dir():
        partial, scratch = out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.scratch")
        for directory in (partial, scratch):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        assert step.decide is not None
        signatures = StoredSignatures(segment, parts)
        decisions: Iterable[Decision] = (
            step.decide(signatures, parameters, context, scratch) if signatures.num_rows else ()
        )
        shown = _store(decisions, partial)
        (partial / _WANTED_NAME).write_bytes(to_json(sorted(shown)))
        shutil.rmtree(scratch, ignore_errors=True)
        os.replace(partial, out)
    return frozenset(json.loads((out / _WANTED_NAME).read_bytes()))


def read_decisions(directory: Path, part: int) -> dict[tuple[int, int], Decision]:
    """The decisions about the records of a part, by number and piece."""
    path = _path(directory, part)
    found: dict[tuple[int, int], Decision] = {}
    if path.is_file():
        for line in path.read_bytes().splitlines():
            number, piece, drop, facts = json.loads(line)
            reason = None if drop is None else Drop(drop[0], drop[1], drop[2])
            found[number, piece] = Decision(number, piece, reason, facts)
    return found


def _store(decisions: Iterable[Decision], directory: Path) -> list[str]:
    held: dict[int, list[bytes]] = {}
    shown: dict[bytes, str] = {}
    count = 0
    for decision in decisions:
        drop = decision.drop
        line = [
            decision.number,
            decision.piece,
            None if drop is None else [drop.reason, drop.value, drop.facts],
            decision.facts,
        ]
        held.setdefault(decision.number >> 32, []).append(to_json(line) + b"\n")
        count += 1
        group = None if drop is None else drop.facts.get(GROUP_FACT)
        if isinstance(group, str):
            shown[blake2b(group.encode(), digest_size=8).digest()] = group
            if len(shown) > SHOWN_GROUPS:
                del shown[max(shown)]
        if count == _HELD:
            _append(held, directory)
            held, count = {}, 0
    _append(held, directory)
    return sorted(shown.values())


def _append(held: dict[int, list[bytes]], directory: Path) -> None:
    for part, lines in held.items():
        with open(_path(directory, part), "ab") as file:
            file.writelines(lines)


def _path(directory: Path, part: int) -> Path:
    return directory / f"{part_name(part)}.decisions.jsonl"
