# SPDX-License-Identifier: Apache-2.0
"""Sealed: what was written comes back, and nothing else does."""

import json
import random
from pathlib import Path

import pytest

from mindvl_data.shards.sealed import SealError, seal, unseal

CONTENT = {"samples": 7, "names": ["a", "b"], "share": 0.1}


def test_what_was_sealed_comes_back(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(seal(CONTENT))
    assert unseal(tmp_path / "file", max_bytes=1000) == CONTENT


def test_a_changed_byte_is_either_found_or_changes_nothing(tmp_path: Path) -> None:
    generator, sealed = random.Random(0), seal(CONTENT)
    found = 0
    for _ in range(500):
        changed = bytearray(sealed)
        changed[generator.randrange(len(sealed))] ^= 1 << generator.randrange(8)
        (tmp_path / "file").write_bytes(changed)
        try:
            assert unseal(tmp_path / "file", max_bytes=1000) == CONTENT
        except SealError:
            found += 1
    assert found > 400  # the others changed blanks


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"[" * 500_000, "invalid JSON"),
        (b"\xff\xfe", "invalid JSON"),
        (b'{"samples": ' + b"9" * 5000 + b"}", "invalid JSON"),
        (b"[1]", "must be a JSON object, got list"),
        (b'{"samples": 7}', "checksum is wrong"),
        (b" " * 600_001, "larger than 600000 bytes"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(SealError, match=what):
        unseal(tmp_path / "file", max_bytes=600_000)


def test_a_file_of_before_there_were_checksums_can_be_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps(CONTENT))
    assert unseal(tmp_path / "file", max_bytes=1000, requires_checksum=False) == CONTENT
    (tmp_path / "file").write_text(json.dumps({**CONTENT, "checksum": "0"}))
    with pytest.raises(SealError, match="checksum is wrong"):
        unseal(tmp_path / "file", max_bytes=1000, requires_checksum=False)
