# SPDX-License-Identifier: Apache-2.0
"""The step `exact_duplicates`: records with the same bytes, pixels or text.

Comes after the readers, best as the first step, because it is cheap. A content is a digest of 128 bits; equal digests are
found by an external sort.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.duplicates.groups import Groups, RecordTable, decisions, preference
from mindvl_data.curation.duplicates.sorting import SortedRuns, first_of_equal
from mindvl_data.curation.normal_text import normalized
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Decision, Signatures, Step, register

MIB = 1 << 20

SIGNATURE = np.dtype([("digest", "<u8", 2), ("preference", "<f8")])
_VALUE = np.dtype([("rest", "<u8"), ("record", "<u4")])


@dataclass(frozen=True, kw_only=True)
class ExactDuplicates:
    """Parameters of `exact_duplicates`.

    Attributes:
        content: What must be equal: encoded media, decoded pixels, normalized text, or media or pixels together with the
            text. Records without the content are kept.
        keep: Fact whose greatest value selects the record to keep, for example "image_width"; by default the
            first record in input order is kept.
        memory_mib: Memory for sorting, in MiB.
    """

    content: Literal["media", "pixels", "text", "media_and_text", "pixels_and_text"] = "media_and_text"
    keep: str = ""
    memory_mib: int = 1024

    def __post_init__(self) -> None:
        check_memory_mib(self.memory_mib)


def check_memory_mib(memory_mib: int) -> None:
    """Refuse less memory than sorting needs."""
    if memory_mib < 1:
        raise ValueError(f"memory_mib: must be at least 1, got {memory_mib}.")


def content_digest(record: Record, content: str) -> bytes | None:
    """16 bytes that identify the content; None if the record does not have it."""
    digest = blake2b(digest_size=16)
    if "text" in content:
        text = normalized(record.text())
        if not text and content == "text":
            return None
        digest.update(blake2b(text.encode()).digest())
    if content != "text" and not record.media:
        return None
    if "media" in content:
        for item in record.media:
            digest.update(blake2b(item).digest())
    if "pixels" in content:
        for index in range(len(record.media)):
            pixels = record.image(index)
            digest.update(repr(pixels.shape).encode() + blake2b(pixels.tobytes()).digest())
    return digest.digest()


def sign(records: list[Record], config: ExactDuplicates, context: Context) -> Sequence[NDArray[np.uint8]]:
    """One signature for each record that has the content."""
    found = []
    for record in records:
        digest = content_digest(record, config.content)
        rows = np.empty(0 if digest is None else 1, SIGNATURE)
        if digest is not None:
            rows["digest"], rows["preference"] = np.frombuffer(digest, "<u8"), preference(record, config.keep)
        found.append(rows.view(np.uint8).reshape(len(rows), SIGNATURE.itemsize))
    return found


def decide(signatures: Signatures, config: ExactDuplicates, context: Context, directory: Path) -> Iterable[Decision]:
    """Keep one record of each group with equal digests."""
    table = RecordTable(signatures, directory / "records")
    groups = Groups(table.num_records)
    runs = SortedRuns(directory / "runs", _VALUE, memory_bytes=config.memory_mib * MIB)
    for records, rows in table.rows(SIGNATURE):
        values = np.empty(len(records), _VALUE)
        values["rest"], values["record"] = rows["digest"][:, 1], records
        runs.add(np.ascontiguousarray(rows["digest"][:, 0]), values)
    for _, values, firsts in first_of_equal(runs.merged()):
        equal = (values["rest"] == firsts["rest"]) & (values["record"] != firsts["record"])
        groups.join(firsts["record"][equal], values["record"][equal])
    preferences = ((records, rows["preference"]) for records, rows in table.rows(SIGNATURE))
    return decisions(groups, table, preferences, reason="exact_duplicate")


STEP = register(
    Step(
        name="exact_duplicates",
        config=ExactDuplicates,
        summary="Keep one of the records with the same media bytes, pixels or normalized text.",
        section="B.1.1",
        gives=("duplicate_group", "num_duplicates"),
        reasons={"exact_duplicate": "An earlier or better record has the same content."},
        sign=sign,
        decide=decide,
    )
)
