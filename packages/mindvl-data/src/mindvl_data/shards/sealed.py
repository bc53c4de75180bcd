# SPDX-License-Identifier: Apache-2.0
"""JSON files with a checksum, so that damage is detected.

Below the manifest of a directory and the statistics that are stored with it.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

CHECKSUM = "checksum"


class SealError(ValueError):
    """A file is not a JSON object, is too large, or its checksum is wrong."""


def seal(content: dict[str, Any], *, indent: int | None = 1) -> bytes:
    """The content with its checksum, as JSON."""
    return json.dumps({**content, CHECKSUM: _checksum(content)}, indent=indent).encode()


def unseal(path: Path, *, max_bytes: int, requires_checksum: bool = True) -> dict[str, Any]:
    """Read a sealed file and verify its checksum.

    Args:
        max_bytes: Size limit; a larger file is not read.
        requires_checksum: Whether a file without a checksum is refused.

    Raises:
        SealError: The file is damaged; the message says how.
        OSError: The file cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise SealError(f"larger than {max_bytes} bytes")
        text = file.read(size)  # not max_bytes: read() allocates the requested size
    return unseal_text(text, requires_checksum=requires_checksum)


def unseal_text(text: bytes, *, requires_checksum: bool = True) -> dict[str, Any]:
    """Verify and parse sealed content: a whole file or one line of it.

    Raises:
        SealError: The content is damaged; the message says how.
    """
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise SealError(f"must be a JSON object, got {type(content).__name__}")
        checksum = content.pop(CHECKSUM, None)
        if (checksum is not None or requires_checksum) and checksum != _checksum(content):
            raise SealError("its checksum is wrong")
    except SealError:
        raise
    except (ValueError, RecursionError) as error:
        raise SealError(f"invalid JSON ({error})") from error
    return content


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
