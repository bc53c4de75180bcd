# SPDX-License-Identifier: Apache-2.0
"""Predict how long a merge takes, from the bytes it moves and the measured bandwidth of the disks.

Used before run.py on large models. Reading and writing overlap, so that the slower of the two decides if they use different
disks, and their sum if it is one disk.
"""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from .adapters import are_adapters, check_adapters
from .config import MergeConfig
from .directory import ModelDirectory
from .files import real_path
from .output_path import check_paths
from .parents import check_parents
from .sources import pair_tensors

_SAMPLE_BYTES = 2**28
_PIECE_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes, bandwidths and time of a merge; bandwidths and time are None if they were not measured."""

    read_bytes: int
    written_bytes: int
    read_bytes_per_s: float | None = None
    written_bytes_per_s: float | None = None
    seconds: float | None = None

    def as_dict(self) -> dict[str, float]:
        """The known values by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def estimate(config: MergeConfig, *, measure_above_bytes: int = 0) -> Estimate:
    """Check the models and the output path of a merge, and predict its time.

    Args:
        measure_above_bytes: Smaller merges are not timed. Measuring reads 256 MiB of the first model past the page cache and
            writes as much beside the output.

    Raises:
        MergeError: The models cannot be merged, or the output may not be written.
    """
    check_paths(config)
    if are_adapters(config):
        adapters = check_adapters(config)
        adapters.close()
        return Estimate(read_bytes=adapters.read_bytes, written_bytes=adapters.written_bytes)
    directories = [ModelDirectory(path) for path in config.parents]
    try:
        pairing = pair_tensors(config, directories)
        check_parents(config, directories)
        passes = {"ties": 3, "slerp": 2}.get(config.method, 1)
        read = sum(
            directories[source.parent].tensors[source.name].num_bytes * (passes if tensor.is_merged else 1)
            for tensor in pairing.outputs
            for source in tensor.sources
        )
        written = sum(tensor.info.num_bytes for tensor in pairing.outputs)
        if read + written < measure_above_bytes or not written:
            return Estimate(read_bytes=read, written_bytes=written)
        source = max(
            (directories[0].path / file for file in directories[0].files), key=lambda path: path.stat().st_size
        )
    finally:
        for directory in directories:
            directory.close()
    place = next(parent for parent in real_path(config.out).parents if parent.exists())
    reading, writing = _read_bandwidth(source), _write_bandwidth(place)
    times = (read / reading, written / writing)
    is_one_disk = source.stat().st_dev == place.stat().st_dev
    return Estimate(
        read_bytes=read,
        written_bytes=written,
        read_bytes_per_s=reading,
        written_bytes_per_s=writing,
        seconds=sum(times) if is_one_disk else max(times),
    )


def _read_bandwidth(path: Path) -> float:
    buffer = bytearray(_PIECE_BYTES)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, _SAMPLE_BYTES, os.POSIX_FADV_DONTNEED)  # from the disk, not from memory
        start, count = time.perf_counter(), 0
        while count < _SAMPLE_BYTES and (size := os.preadv(descriptor, [buffer], count)):
            count += size
        return count / max(time.perf_counter() - start, 1e-6)
    finally:
        os.close(descriptor)


def _write_bandwidth(place: Path) -> float:
    path = place / f".mindvl-bandwidth-{os.getpid()}"
    data = os.urandom(_PIECE_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        start, count = time.perf_counter(), 0
        while count < _SAMPLE_BYTES:
            count += os.write(descriptor, data)
        os.fsync(descriptor)
        return count / max(time.perf_counter() - start, 1e-6)
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
