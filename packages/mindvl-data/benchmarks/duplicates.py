# SPDX-License-Identifier: Apache-2.0
"""Time, memory and disk space of the searches for duplicates over 10 million signatures on disk.

Run: python packages/mindvl-data/benchmarks/duplicates.py [--quick] [--rows N] [--only METHOD] [--json]
The signatures are random, and every tenth is a changed copy of an earlier one: equal (exact), with 0 to 4 of 64 bits flipped
(images), with each hash value kept with probability 0.9 (text). Each search runs in its own process.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, print_report
from numpy.typing import NDArray

ROWS, QUICK_ROWS = 10_000_000, 200_000
METHODS = ("exact_duplicates", "image_duplicates", "text_duplicates")
GIB = 1 << 30

_BLOCK = 1 << 16
_COPY_EVERY = 10


class FileSignatures:
    """The protocol `Signatures` over a file of rows; record numbers count from 0."""

    def __init__(self, path: Path, width: int) -> None:
        self.width, self.num_rows = width, path.stat().st_size // width
        self._path = path

    def blocks(self) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint8]]]:
        for start in range(0, self.num_rows, _BLOCK):
            rows = np.fromfile(self._path, np.uint8, _BLOCK * self.width, offset=start * self.width)
            rows = rows.reshape(-1, self.width)
            yield np.arange(start, start + len(rows), dtype=np.uint64), np.zeros(len(rows), np.uint32), rows


def run(*, rows: int, only: str | None = None) -> list[Figure]:
    """Create signatures and search them in child processes."""
    figures: list[Figure] = []
    for method in METHODS if only is None else (only,):
        command = [sys.executable, __file__, "--child", method, "--rows", str(rows)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found: dict[str, float] = json.loads(done.stdout)
        note = f"{found['cpu_s']:.0f} s of processor time, signatures of {found['width']:.0f} bytes"
        figures += [
            Figure(name=f"{method}: {rows / 1e6:g} M records", value=found["wall_s"], unit="s", note=note),
            Figure(name=f"{method}: peak memory", value=found["peak_bytes"] / GIB, unit="GiB",
                   note=f"{found['imports_bytes'] / GIB:.2f} after imports, memory_mib 1024"),
            Figure(name=f"{method}: peak of temporary files", value=found["disk_bytes"] / GIB, unit="GiB"),
            Figure(name=f"{method}: planted copies found", value=found["recall"], unit="", at_least=0.98,
                   note=f"{found['extra']:.0f} other records dropped"),
        ]  # fmt: skip
    return figures


def write_signatures(method: str, rows: int, path: Path) -> int:
    """Write random signatures with planted copies of the record before; returns their width."""
    generator = np.random.default_rng(0)
    width = 0
    with open(path, "wb") as file:
        for start in range(0, rows, _BLOCK):
            block = _random_block(method, generator, min(_BLOCK, rows - start), start)
            width = block.shape[1]
            block.tofile(file)
    return width


def _random_block(method: str, generator: np.random.Generator, count: int, start: int) -> NDArray[np.uint8]:
    copies = np.flatnonzero((np.arange(start, start + count) % _COPY_EVERY == _COPY_EVERY - 1) & (np.arange(count) > 0))
    if method == "text_duplicates":
        from mindvl_data.curation.duplicates.minhash import PREFERENCE_BYTES, TextDuplicates

        values = generator.integers(0, 1 << 32, (count, TextDuplicates().num_values), np.uint32)
        kept = generator.random((len(copies), values.shape[1])) < 0.9
        values[copies] = np.where(kept, values[copies - 1], values[copies])
        return np.concatenate([values.view(np.uint8), np.zeros((count, PREFERENCE_BYTES), np.uint8)], axis=1)
    if method == "exact_duplicates":
        from mindvl_data.curation.duplicates.exact import SIGNATURE

        signatures = np.zeros(count, SIGNATURE)
        signatures["digest"] = generator.integers(0, 1 << 64, (count, 2), np.uint64)
        signatures[copies] = signatures[copies - 1]
        return signatures.view(np.uint8).reshape(count, -1)
    from mindvl_data.curation.duplicates import perceptual

    images = np.zeros(count, perceptual.SIGNATURE)
    hashes = generator.integers(0, 1 << 64, count, np.uint64)
    flips = np.zeros(len(copies), np.uint64)
    for _ in range(4):  # a bit that is drawn twice is flipped back
        drawn = np.uint64(1) << generator.integers(0, 64, len(copies), np.uint64)
        flips ^= np.where(generator.random(len(copies)) < 0.5, drawn, np.uint64(0))
    hashes[copies] = hashes[copies - 1] ^ flips
    images["hash"], images["whole"], images["count"] = hashes, hashes, 1
    return images.view(np.uint8).reshape(count, -1)


def measure(method: str, rows: int) -> dict[str, float]:
    """Search in this process; returns time, memory, disk space and the share of the copies that were dropped."""
    from mindvl_data.curation.step import Context, find_step

    step = find_step(method)
    assert step.decide is not None
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        width = write_signatures(method, rows, root / "signatures")
        (root / "scratch").mkdir()
        disk = DiskPeak(root / "scratch")
        imports, started, cpu = _peak_bytes(), time.perf_counter(), time.process_time()
        signatures: Any = FileSignatures(root / "signatures", width)
        dropped = np.zeros(rows, bool)
        for decision in step.decide(signatures, step.config(), Context(seed=0, cache=root), root / "scratch"):
            dropped[decision.number] |= decision.drop is not None
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        disk_bytes = disk.stop()
    is_copy = np.arange(rows) % _COPY_EVERY == _COPY_EVERY - 1
    is_copy[::_BLOCK] = False  # the first record of a block has no record before it in the block
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "peak_bytes": _peak_bytes(),
        "imports_bytes": imports,
        "disk_bytes": disk_bytes,
        "width": width,
        "recall": float(dropped[is_copy].mean()),
        "extra": int(dropped[~is_copy].sum()),
    }


class DiskPeak:
    """The largest size of a directory, looked at twice a second."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._peak, self._stopped = directory, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._stopped.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._stopped.wait(0.5):
            total = 0
            for path in self._directory.rglob("*"):
                try:
                    total += path.stat().st_size
                except FileNotFoundError:  # removed since it was listed
                    continue
            self._peak = max(self._peak, total)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--only", choices=METHODS)
    parser.add_argument("--child", choices=METHODS)
    options = parser.parse_args()
    rows = options.rows or (QUICK_ROWS if options.quick else ROWS)
    if options.child:
        print(json.dumps(measure(options.child, rows)))
    else:
        print_report(run(rows=rows, only=options.only), as_json=options.json)


if __name__ == "__main__":
    main()
