# SPDX-License-Identifier: Apache-2.0
"""The bytes of an index file: lengths have to fit the header, samples their members, and all of it the shard."""

from pathlib import Path

import numpy as np
import pytest

from mindvl_data.shards.index_format import HEADER_BYTES, index_arrays, index_bytes, is_consistent


@pytest.fixture
def content(shard_directories: dict[str, Path]) -> bytes:
    return (shard_directories["images"] / "shard-000000.idx").read_bytes()


def test_a_file_of_another_length_than_its_header_says_is_no_index(content: bytes) -> None:
    arrays = index_arrays(content)
    assert arrays is not None
    assert len(content) == index_bytes({"samples": 16, "images": int((arrays[1]["height"] > 0).sum()), "videos": 0})
    huge = content[:8] + np.array([1 << 62, 1 << 62], "<u8").tobytes() + content[24:]
    for damaged in (content[:-1], content + b"\0", content[: HEADER_BYTES - 1], b"", b"X" + content[1:], huge):
        assert index_arrays(damaged) is None


@pytest.mark.parametrize(
    ("array", "field", "value"),
    [
        (0, "num_members", 0),
        (0, "num_members", 9),
        (0, "first_member", 1_000_000),
        (0, "offset", 0),
        (0, "offset", 1 << 63),
        (0, "length", (1 << 32) - 1),
        (1, "offset", (1 << 64) - 1),
        (1, "length", (1 << 32) - 1),
    ],
)
def test_what_points_outside_is_found(content: bytes, array: int, field: str, value: int) -> None:
    arrays = index_arrays(content)
    assert arrays is not None
    num_bytes = int(np.frombuffer(content, "<u8", 1, 24)[0])
    assert is_consistent(arrays, num_bytes)
    assert not is_consistent(arrays, num_bytes // 2)
    changed = tuple(part.copy() for part in arrays)
    changed[array][field][3] = value
    assert not is_consistent((changed[0], changed[1]), num_bytes)
