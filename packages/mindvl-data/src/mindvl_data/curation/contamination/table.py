# SPDX-License-Identifier: Apache-2.0
"""What benchmark items look like to the search for contamination: hashes of runs of tokens, and hashes of images.

Comes after benchmarks.py, before decontaminate.py. Built once before the workers start, stored in one file, and held in
memory by each worker: 12 bytes for each run of tokens and each image.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.contamination.benchmarks import BenchmarkItem
from mindvl_data.curation.duplicates.perceptual import image_hash
from mindvl_data.curation.duplicates.sorting import Keys, combined
from mindvl_data.curation.normal_text import tokens
from mindvl_data.curation.record import Record
from mindvl_data.errors import DataError, SampleError
from mindvl_data.shards.atomic import AtomicFile

# A run of tokens in more items is an instruction or a template; GPT-3 (Brown et al., 2020) uses this number.
MAX_ITEMS = 10
EXCERPT_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class BenchmarkTable:
    """Hashes of all benchmark items.

    Attributes:
        runs: Distinct hashes of runs of tokens, ascending.
        run_items: For each, the first item that has it.
        images: Hashes of images.
        image_items: For each, its item.
        names, excerpts: For each item, its name and the beginning of its text.
    """

    runs: Keys
    run_items: NDArray[np.uint32]
    images: Keys
    image_items: NDArray[np.uint32]
    names: Sequence[str]
    excerpts: Sequence[str]

    def find_runs(self, hashes: Keys) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Positions in `hashes` that a benchmark has, and the item of each."""
        if not len(self.runs) or not len(hashes):
            return np.empty(0, np.int64), np.empty(0, np.uint32)
        places = np.minimum(np.searchsorted(self.runs, hashes), len(self.runs) - 1)
        found = np.flatnonzero(self.runs[places] == hashes)
        return found, self.run_items[places[found]]

    def find_image(self, value: int, radius: int) -> tuple[int, int] | None:
        """The nearest image within the radius: its item, and the number of different bits; compares with all images."""
        if not len(self.images):
            return None
        distances = np.bitwise_count(self.images ^ np.uint64(value))
        nearest = int(distances.argmin())
        return (int(self.image_items[nearest]), int(distances[nearest])) if distances[nearest] <= radius else None

    def save(self, path: Path) -> None:
        """Write the table; the file appears when it is complete."""
        listed = np.frombuffer(json.dumps([list(self.names), list(self.excerpts)]).encode(), np.uint8)
        with AtomicFile(path) as file:
            np.savez(
                file.file, runs=self.runs, run_items=self.run_items, images=self.images, image_items=self.image_items,
                listed=listed,
            )  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> "BenchmarkTable":
        """Read a table that `save` wrote."""
        with np.load(path) as stored:
            arrays = {name: stored[name] for name in stored.files}
        names, excerpts = json.loads(arrays.pop("listed").tobytes())
        return cls(names=names, excerpts=excerpts, **arrays)


def build_table(items: Iterable[BenchmarkItem], *, num_tokens: int, method: str) -> BenchmarkTable:
    """Hash all items.

    Raises:
        DataError: An image of a benchmark cannot be decoded.
    """
    runs: list[Keys] = [np.empty(0, np.uint64)]
    run_items: list[NDArray[np.uint32]] = [np.empty(0, np.uint32)]
    images: list[int] = []
    image_items: list[int] = []
    names: list[str] = []
    excerpts: list[str] = []
    for number, item in enumerate(items):
        names.append(item.name)
        excerpts.append(max(item.texts, key=len, default="")[:EXCERPT_CHARACTERS])
        hashes = np.unique(np.concatenate([runs[0], *(run_hashes(tokens(text), num_tokens) for text in item.texts)]))
        runs.append(hashes)
        run_items.append(np.full(len(hashes), number, np.uint32))
        for value in image_hashes(item.images, method, item.name):
            images.append(value)
            image_items.append(number)
    all_runs, all_items = np.concatenate(runs), np.concatenate(run_items)
    distinct, first, counts = np.unique(all_runs, return_index=True, return_counts=True)
    special = counts <= MAX_ITEMS
    return BenchmarkTable(
        runs=distinct[special],
        run_items=all_items[first[special]],
        images=np.array(images, np.uint64),
        image_items=np.array(image_items, np.uint32),
        names=names,
        excerpts=excerpts,
    )


def run_hashes(words: list[str], num_tokens: int) -> Keys:
    """A 64-bit hash of each run of `num_tokens` tokens, in order; none if there are fewer tokens."""
    if len(words) < num_tokens:
        return np.empty(0, np.uint64)
    hashes = np.array([_token_hash(word) for word in words], np.uint64)
    return combined(np.lib.stride_tricks.sliding_window_view(hashes, num_tokens))


def image_hashes(images: Sequence[bytes], method: str, name: str) -> list[int]:
    """The hashes of the images of an item that are not nearly empty."""
    record = Record(number=0, id=name, body={}, media=tuple(images))
    try:
        found = [image_hash(record.image(index), method) for index in range(len(images))]
    except SampleError as error:
        raise DataError(f"{name}: {error}. Copy the benchmark again.") from error
    return [value for value in found if value is not None]


@lru_cache(maxsize=1 << 18)
def _token_hash(word: str) -> int:
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little")
