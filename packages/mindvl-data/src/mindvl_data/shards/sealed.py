# SPDX-License-Identifier: Apache-2.0
"""JSON files with a checksum, so that a damaged one is never taken for another content.

Below the manifest of a directory and the figures that are kept beside it.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

CHECKSUM = "checksum"


class SealError(ValueError):
    """A file is no JSON object, too large, or not what was written."""


def seal(content: dict[str, Any], *, indent: int | None = 1) -> bytes:
    """The content with its checksum, as JSON."""
    return json.dumps({**content, CHECKSUM: _checksum(content)}, indent=indent).encode()


def unseal(path: Path, *, max_bytes: int, requires_checksum: bool = True) -> dict[str, Any]:
    """What was sealed.

    Args:
        max_bytes: A larger file is not read.
        requires_checksum: Whether a file without a checksum is refused.

    Raises:
        SealError: It is damaged; the message says how.
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise SealError(f"larger than {max_bytes} bytes")
        text = file.read(size)  # as large as it is: a read reserves memory for all that is asked for
    return unseal_text(text, requires_checksum=requires_checksum)


def unseal_text(text: bytes, *, requires_checksum: bool = True) -> dict[str, Any]:
    """What was sealed, of the bytes of a file or of one of its lines.

    Raises:
        SealError: As `unseal`.
    """
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise SealError(f"holds {type(content).__name__} instead of an object")
        checksum = content.pop(CHECKSUM, None)
        if (checksum is not None or requires_checksum) and checksum != _checksum(content):
            raise SealError("its checksum is wrong")
    except SealError:
        raise
    except (ValueError, RecursionError) as error:
        raise SealError(f"no JSON ({error})") from error
    return content


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
