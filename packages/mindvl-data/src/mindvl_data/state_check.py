# SPDX-License-Identifier: Apache-2.0
"""Check types, ranges and sums of a saved state of the data order before it is used.

Used for states read from files: by tracker.py for the ledger of a checkpoint and by audit_lines.py for marks.
"""

import base64
import math
import zlib
from typing import Any

import numpy as np

NUM_FIELDS = 6  # of a waiting sample: source, epoch, shard, sample_index, tokens, patches
_LARGEST = 1 << 62
_MAX_BYTES = 64 << 20  # of decompressed samples; a window of large steps has one or two million bytes


def check_order(order: Any, *, num_sources: int) -> None:
    """Raise ValueError, KeyError or TypeError unless `order` is a state of a data order over `num_sources` sources.

    Args:
        order: The state, with its buffer unpacked.
    """
    if type(order) is not dict:
        raise TypeError("order is not an object")
    _whole(order["step"], "step")
    derived = order["derived"]
    if derived is not None:  # mean tokens, patches per token, patch limit, shares of the sources
        *figures, shares = [*derived, []] if len(derived) == 3 else derived
        if type(derived) is not list or not all(map(_is_finite, [*figures, *shares])):
            raise ValueError(f"derived: must be a list of finite numbers, got {_shown(derived)}")
    drawn_at, owed = order["drawn_at"], order["owed"]
    if type(drawn_at) is not list or len(drawn_at) != num_sources:
        raise ValueError(f"drawn_at: must be a list of {num_sources} positions, got {_shown(drawn_at)}")
    for epoch, position in drawn_at:
        _whole(epoch, "drawn_at")
        _whole(position, "drawn_at")
    if type(owed) is not list or len(owed) != num_sources or not all(map(_is_finite, owed)):
        raise ValueError(f"owed: must be a list of {num_sources} finite numbers, got {_shown(owed)}")
    for name in ("drawn", "dropped", "totals", "tokens_by_source"):
        counts = order[name]
        if type(counts) is not dict:
            raise TypeError(f"{name} is not an object")
        for count in counts.values():
            _whole(count, name)
    _check_samples(order, num_sources)


def check_change(change: Any) -> None:
    """Raise ValueError, KeyError or TypeError unless `change` is an accepted change of data."""
    if type(change) is not dict:
        raise TypeError("change is not an object")
    _whole(change["step"], "change")
    if type(change["who"]) is not str or type(change["when"]) is not str or type(change["sources"]) is not dict:
        raise TypeError("change lacks who, when or sources")
    for old, new in change["sources"].values():
        if not isinstance(old, str | None) or not isinstance(new, str | None):
            raise TypeError("sources of a change are not identities")


def pack_samples(samples: list[list[int]]) -> str:
    """Compress waiting samples into base64 text, a tenth of the size of JSON."""
    columns = np.array(samples, "<i8").reshape(-1, NUM_FIELDS).T  # similar values next to each other
    return base64.b64encode(zlib.compress(columns.tobytes(), 9)).decode()


def unpack_samples(text: Any) -> list[list[int]]:
    """The inverse of pack_samples.

    Raises:
        ValueError: The text was not written by pack_samples, or is larger than any state.
    """
    if type(text) is not str:
        raise ValueError(f"buffer: must be a string, got {_shown(text)}")
    try:
        inflate = zlib.decompressobj()
        content = inflate.decompress(base64.b64decode(text, validate=True), _MAX_BYTES)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"buffer: must be base64 text of compressed samples, got {error}") from error
    if not inflate.eof or len(content) % (8 * NUM_FIELDS):
        raise ValueError(f"buffer: must be whole samples of at most {_MAX_BYTES} bytes, got {len(content)}")
    samples: list[list[int]] = np.frombuffer(content, "<i8").reshape(NUM_FIELDS, -1).T.tolist()
    return samples


def _check_samples(order: dict[str, Any], num_sources: int) -> None:
    buffer, window = order["buffer"], order["window"]
    for sample in buffer:
        if len(sample) != NUM_FIELDS or any(type(value) is not int or not 0 <= value < _LARGEST for value in sample):
            raise ValueError(f"buffer: must be a list of samples, got {_shown(sample)}")
        if sample[0] >= num_sources:
            raise ValueError(f"buffer: source must be less than {num_sources}, got {sample[0]}")
    in_window = 0
    for step in window:
        for count in step:
            _whole(count, "window")
            in_window += count
    if in_window > len(buffer):
        raise ValueError(f"window: must have at most the {len(buffer)} samples of buffer, got {in_window}")


def _whole(value: Any, name: str) -> None:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"{name}: must be an integer from 0 to {_LARGEST - 1}, got {_shown(value)}")


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST and math.isfinite(value)


def _shown(value: Any) -> str:
    return f"{value!r:.60}"
