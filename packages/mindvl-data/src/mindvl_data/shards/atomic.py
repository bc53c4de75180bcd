# SPDX-License-Identifier: Apache-2.0
"""Write a file atomically: after a crash it has either its old content or its new content.

Below every file of this package that is written as a whole: shards, indexes, manifests, parts of a curation.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

_BUFFER = 1 << 20


class AtomicFile:
    """A file under a temporary name, which is flushed to disk and renamed at the end of a `with` block, or removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
        self.file: BinaryIO = open(self._partial, "wb", buffering=_BUFFER)  # noqa: SIM115 - closed by commit or abort
        self.write = self.file.write

    def commit(self) -> None:
        """Flush the content to disk and rename the file."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self._partial, self.path)

    def abort(self) -> None:
        """Remove the temporary file."""
        self._partial.unlink(missing_ok=True)
        with suppress(OSError):  # on a full disk, close() fails again with the buffered bytes
            self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.commit()
        except BaseException:  # a full disk
            self.abort()
            raise


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file by one with this content."""
    with AtomicFile(path) as file:
        file.write(content)
