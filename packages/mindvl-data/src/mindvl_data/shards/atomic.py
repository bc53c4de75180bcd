# SPDX-License-Identifier: Apache-2.0
"""Replace a file atomically: after a crash it has either its old content or its new content.

Below every file of this package that writes an index, a manifest or a progress file.
"""

import os
import threading
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to a temporary file in the same directory, flush it to disk, and rename it to `path`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
