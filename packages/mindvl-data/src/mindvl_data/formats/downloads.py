# SPDX-License-Identifier: Apache-2.0
"""Images at http(s) addresses: downloaded once, bounded in bytes and seconds, kept in a directory.

Used by the writer of shards if the user allows it with --fetch-urls.
"""

import contextlib
import time
import urllib.error
import urllib.request
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path

from mindvl_data.errors import SampleError, redact
from mindvl_data.shards.atomic import write_atomically

MAX_BYTES = 100_000_000  # of one file
TIMEOUT_S = 20.0  # without a byte from the server
MAX_S = 120.0  # for one file
_TRIES = 3
_WAIT_S = 1.0  # before the second try; doubled for each further one
_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_BLOCK = 1 << 16


class Downloads:
    """Files of addresses in one directory; several threads may read at the same time.

    Args:
        directory: Created if it is missing. A file is named by the hash of its address.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def read(self, address: str) -> bytes:
        """The bytes at an address, from the directory if it was read before.

        Raises:
            SampleError: The address cannot be read, or its file is larger than MAX_BYTES.
        """
        path = self._directory / sha256(address.encode()).hexdigest()
        with contextlib.suppress(FileNotFoundError):
            return path.read_bytes()
        content = _download(address)
        write_atomically(path, content)
        return content


def _download(address: str) -> bytes:
    shown = redact(address)[:120]
    for left in range(_TRIES - 1, -1, -1):
        try:
            return _read_once(address, shown)
        except urllib.error.HTTPError as error:
            reason = f"HTTP status {error.code}"
            if error.code not in _RETRIED or not left:
                raise SampleError(f"{shown} cannot be downloaded: {reason}") from error
        except (OSError, HTTPException, ValueError) as error:
            if not left:
                raise SampleError(f"{shown} cannot be downloaded: {error}") from error
        time.sleep(_WAIT_S * 2 ** (_TRIES - 1 - left))
    raise AssertionError("every last try returns or raises")


def _read_once(address: str, shown: str) -> bytes:
    started, content = time.monotonic(), bytearray()
    request = urllib.request.Request(address, headers={"User-Agent": "mindvl"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        while block := response.read(_BLOCK):
            content += block
            if len(content) > MAX_BYTES:
                raise SampleError(f"{shown} has more than {MAX_BYTES} bytes")
            if time.monotonic() - started > MAX_S:
                raise SampleError(f"{shown} takes longer than {MAX_S:.0f} seconds")
    return bytes(content)
