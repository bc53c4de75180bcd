# SPDX-License-Identifier: Apache-2.0
"""A file is written whole, or stays as it was."""

import os
from pathlib import Path

import pytest

from mindvl_cli.failures import CliError
from mindvl_cli.whole_file import write_whole


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is flushed does not reach the disk."""

    def fsync(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)


def test_directories_are_made_and_the_content_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "page.html"
    write_whole(path, "one\r\n")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["page.html"]


def test_a_full_disk_is_one_sentence_and_the_former_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    write_whole(path, "former")
    full_disk(monkeypatch)
    with pytest.raises(CliError, match=r"page\.html: cannot be written \(No space left on device\)\. Free space"):
        write_whole(path, "new")
    assert path.read_text() == "former"
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "x"
    with pytest.raises(CliError, match="/dev/full: cannot be written"):
        write_whole(Path("/dev/full"), "x")
    assert Path("/dev/full").is_char_device()
    with pytest.raises(CliError, match="cannot be written"):
        write_whole(tmp_path / "target" / "below", "x")
