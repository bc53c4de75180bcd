# SPDX-License-Identifier: Apache-2.0
"""Open shards, read at any offset from any thread.

Comes after the index; everything that reads samples goes through it.
"""

import os
import threading
from collections import OrderedDict
from pathlib import Path

from mindvl_data.errors import DataError


class ShardFiles:
    """Open shards, read at any offset from any thread; of too many, the least recently used one is closed."""

    def __init__(self, max_open: int = 256) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._max_open = max_open
        self._lock = threading.Lock()

    def read(self, path: Path, offset: int, length: int) -> bytes:
        """Exactly `length` bytes of `path` from `offset`."""
        with self._lock:  # also keeps a descriptor from being closed by another thread between look-up and read
            descriptor = self._open.get(path)
            if descriptor is None:
                try:
                    descriptor = self._open[path] = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise DataError(f"shard cannot be opened: {error.strerror}. {path}. Put it back.") from error
                if len(self._open) > self._max_open:
                    os.close(self._open.popitem(last=False)[1])
            else:
                self._open.move_to_end(path)
            content = os.pread(descriptor, length, offset)
        if len(content) != length:
            raise DataError(
                f"{length} bytes wanted, {len(content)} are there. {path} at byte {offset}. "
                "The shard changed after it was indexed: run `mindvl data index` again."
            )
        return content

    def close(self) -> None:
        """Close all descriptors."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])
