# SPDX-License-Identifier: Apache-2.0
"""The step `image_duplicates`: images whose perceptual hashes differ in few bits.

Comes after exact_duplicates. The hashes are those of the imagehash library, 64 bits. Every pair within the radius is
found: the 64 bits are cut into blocks, r differing bits touch at most r blocks, so two such hashes agree on all blocks
but r, for at least one choice of these r (Manku et al., "Detecting near-duplicates for web crawling", 2007). Each choice is
one sort.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import combinations, pairwise
from math import comb
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageStat

from mindvl_data.curation.duplicates.exact import MIB, check_memory_mib
from mindvl_data.curation.duplicates.groups import Groups, RecordTable, Rows, decisions, preference
from mindvl_data.curation.duplicates.sorting import (
    SortedRuns,
    combined,
    first_of_equal,
    pairs_in_buckets,
    whole_buckets,
)
from mindvl_data.curation.extras import require
from mindvl_data.curation.normal_text import normalized
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Decision, Signatures, Step, register

HASH_BITS = 64
MAX_RADIUS = 16
MIN_CONTRAST = 2.0  # standard deviation of gray values, of 255; hashes of emptier images are noise

# One row for each image; `whole` identifies the hashes of all images, and the text where it must be equal.
SIGNATURE = np.dtype(
    [("hash", "<u8"), ("whole", "<u8"), ("text", "<u8"), ("position", "u1"), ("count", "u1"), ("preference", "<f8")]
)
_CANDIDATE = np.dtype([("hash", "<u8"), ("record", "<u4"), ("count", "u1")])
_MAX_IMAGES = 255
# Measured costs of a sorted row and of a compared pair, in microseconds; only their ratio matters, for the number of blocks.
_SORT_COST, _PAIR_COST = 0.5, 0.02


@dataclass(frozen=True, kw_only=True)
class ImageDuplicates:
    """Parameters of `image_duplicates`.

    Attributes:
        method: Hash of the imagehash library: "phash" (low frequencies) or "dhash" (gradients).
        radius: Maximum number of different bits of 64, for every image of the two records, which must have the same number
            of images.
            The default keeps the precision at 1 on the planted set of docs/design/evidence/curation.md; larger
            radii need more sorts (`mindvl bench duplicates` shows their time).
        same_text: Whether the normalized texts must be equal too, for several questions about one image.
        keep: Fact whose greatest value selects the record to keep, for example "image_width"; by default the
            first record in input order is kept.
        memory_mib: Memory for sorting, in MiB.
    """

    method: Literal["phash", "dhash"] = "phash"
    radius: int = 4
    same_text: bool = False
    keep: str = ""
    memory_mib: int = 1024

    def __post_init__(self) -> None:
        check_memory_mib(self.memory_mib)
        if not 0 <= self.radius <= MAX_RADIUS:
            raise ValueError(f"radius: must be from 0 to {MAX_RADIUS}, got {self.radius}.")


def image_hash(pixels: NDArray[np.uint8], method: str) -> int | None:
    """The 64-bit hash of an image [H, W, 3] by the imagehash library; None if the image is nearly empty."""
    imagehash = require("imagehash", extra="curation", where="steps: image_duplicates")
    gray = Image.fromarray(pixels).convert("L")  # imagehash would convert it in the same way
    if ImageStat.Stat(gray).stddev[0] < MIN_CONTRAST:
        return None
    bits = getattr(imagehash, method)(gray).hash
    return int.from_bytes(np.packbits(bits.ravel()).tobytes(), "big")


def sign(records: list[Record], config: ImageDuplicates, context: Context) -> Sequence[NDArray[np.uint8]]:
    """One signature for each image of each record; none for a record with a nearly empty image."""
    found = []
    for record in records:
        hashes = [image_hash(record.image(index), config.method) for index in range(len(record.media))]
        rows = np.zeros(0 if None in hashes else min(len(hashes), _MAX_IMAGES), SIGNATURE)
        rows["hash"] = hashes[: len(rows)]
        text = normalized(record.text()).encode() if config.same_text else b""
        rows["text"] = np.frombuffer(blake2b(text, digest_size=8).digest(), "<u8")
        whole = blake2b(rows["hash"].tobytes() + rows["text"][:1].tobytes(), digest_size=8)
        rows["whole"] = np.frombuffer(whole.digest(), "<u8")
        rows["position"], rows["count"] = np.arange(len(rows)), len(rows)
        rows["preference"] = preference(record, config.keep)
        found.append(rows.view(np.uint8).reshape(len(rows), SIGNATURE.itemsize))
    return found


def decide(signatures: Signatures, config: ImageDuplicates, context: Context, directory: Path) -> Iterable[Decision]:
    """Join records with equal hashes, then those within the radius, and keep one of each group."""
    table = RecordTable(signatures, directory / "records")
    groups = Groups(table.num_records)
    images = _Images(table, directory)
    is_representative = _join_equal(table, groups, directory, config.memory_mib * MIB)
    num_blocks = best_num_blocks(int(is_representative.sum()), config.radius)
    for choice, mask in enumerate(block_masks(num_blocks, config.radius) if config.radius else ()):
        runs = SortedRuns(directory / f"choice-{choice:04d}", _CANDIDATE, memory_bytes=config.memory_mib * MIB)
        for records, rows in table.rows(SIGNATURE):
            chosen = is_representative[records] & (rows["position"] == 0)
            records, rows = records[chosen], rows[chosen]
            candidates = np.empty(len(records), _CANDIDATE)
            candidates["hash"], candidates["record"], candidates["count"] = rows["hash"], records, rows["count"]
            columns = [rows["hash"] & np.uint64(mask), rows["text"], rows["count"].astype(np.uint64)]
            runs.add(combined(np.stack(columns, axis=1)), candidates)
        _join_similar(runs, groups, images, config.radius)
    preferences = ((records, rows["preference"]) for records, rows in table.rows(SIGNATURE))
    return decisions(groups, table, preferences, reason="image_duplicate")


def block_masks(num_blocks: int, radius: int) -> Iterator[int]:
    """Masks of the bits that must agree, one for each choice of `radius` blocks that may differ."""
    borders = [HASH_BITS * block // num_blocks for block in range(num_blocks + 1)]
    blocks = [(1 << high) - (1 << low) for low, high in pairwise(borders)]
    for different in combinations(range(num_blocks), radius):
        yield sum(block for number, block in enumerate(blocks) if number not in different)


def best_num_blocks(num_rows: int, radius: int) -> int:
    """The number of blocks with the least estimated time: more blocks mean more sorts with smaller buckets."""

    def cost(num_blocks: int) -> float:
        equal_bits = HASH_BITS * (num_blocks - radius) // num_blocks
        pairs_per_row = num_rows / 2 ** (equal_bits + 1)
        return comb(num_blocks, radius) * (_SORT_COST + pairs_per_row * _PAIR_COST)

    return min(range(radius + 1, radius + 9), key=cost)


class _Images:
    """The hashes of all images on disk, by record and position."""

    def __init__(self, table: RecordTable, directory: Path) -> None:
        self._paths = directory / "hashes.bin", directory / "starts.bin"
        num_images = 0
        with open(self._paths[0], "wb") as hashes, open(self._paths[1], "wb") as starts:
            for _, rows in table.rows(SIGNATURE):
                rows["hash"].tofile(hashes)
                (num_images + np.flatnonzero(rows["position"] == 0)).astype(np.uint64).tofile(starts)
                num_images += len(rows)

    def near(self, first: Rows, second: Rows, position: int, radius: int) -> NDArray[np.bool_]:
        """Whether the images of the records at this position are within the radius."""
        hashes, starts = (np.memmap(path, np.uint64, "r") for path in self._paths)
        different: NDArray[Any] = hashes[starts[first] + position] ^ hashes[starts[second] + position]
        return np.bitwise_count(different) <= radius


def _join_equal(table: RecordTable, groups: Groups, directory: Path, memory_bytes: int) -> NDArray[np.bool_]:
    """Join records whose hashes are all equal; returns for each record whether it represents its equals."""
    is_representative = np.ones(table.num_records, bool)
    runs = SortedRuns(directory / "equal", np.uint32, memory_bytes=memory_bytes)
    for records, rows in table.rows(SIGNATURE):
        first = rows["position"] == 0
        runs.add(rows["whole"][first], records[first])
    for _, records, firsts in first_of_equal(runs.merged()):
        groups.join(firsts, records)
        is_representative[records[records != firsts]] = False
    return is_representative


def _join_similar(runs: SortedRuns, groups: Groups, images: _Images, radius: int) -> None:
    """Join pairs within the radius; the first images are the candidates, the others are compared afterwards."""
    for keys, values in whole_buckets(runs.merged()):
        for first, second in pairs_in_buckets(keys):
            near = np.bitwise_count(values["hash"][first] ^ values["hash"][second]) <= radius
            pairs, others = values[first[near]], values["record"][second[near]]
            for position in range(1, int(pairs["count"].max(initial=1))):
                several = np.flatnonzero(pairs["count"] > position)
                far = ~images.near(pairs["record"][several], others[several], position, radius)
                pairs, others = np.delete(pairs, several[far]), np.delete(others, several[far])
            groups.join(pairs["record"], others)


STEP = register(
    Step(
        name="image_duplicates",
        config=ImageDuplicates,
        summary="Keep one of the records whose images have perceptual hashes within a Hamming distance.",
        section="B.1.1",
        needs=("image",),
        gives=("duplicate_group", "num_duplicates"),
        reasons={"image_duplicate": "An earlier or better record has an image that looks the same."},
        sign=sign,
        decide=decide,
    )
)
