# SPDX-License-Identifier: Apache-2.0
"""Atomic writes: a file has its old content until its new content is on disk."""

import os
from pathlib import Path

import pytest

from mindvl_data.shards.atomic import AtomicFile, write_atomically


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"first", b"", b"second"):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_that_fails_keeps_the_old_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(TypeError), AtomicFile(path) as file:
        file.write("a text")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
