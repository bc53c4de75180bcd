# SPDX-License-Identifier: Apache-2.0
"""Shards: bytes that others can read, the same every time."""

import tarfile
import threading
from pathlib import Path

import pytest
import webdataset

from mindvl_data import DataError
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.scan import walk
from mindvl_data.shards.tar import Member, ShardWriter, name_in_header, split_name, tar_header


def write(path: Path, members: dict[str, bytes]) -> Path:
    with ShardWriter(path) as writer:
        for name, content in members.items():
            writer.add(name, content)
    return path


MEMBERS = {"a.json": b"{}", "a.0.png": bytes(700), "b.json": b"x" * 512}


def test_a_standard_tar_reader_reads_our_shards(tmp_path: Path) -> None:
    with tarfile.open(write(tmp_path / "s.tar", MEMBERS)) as archive:
        assert {m.name: archive.extractfile(m).read() for m in archive} == MEMBERS  # type: ignore[union-attr]


def test_webdataset_reads_our_shards_and_we_read_those_of_its_writer(tmp_path: Path) -> None:
    ours = webdataset.WebDataset(str(write(tmp_path / "ours.tar", MEMBERS)), shardshuffle=False)
    read = [{name: content for name, content in sample.items() if not name.startswith("__")} for sample in ours]
    assert read == [{"json": b"{}", "0.png": bytes(700)}, {"json": b"x" * 512}]

    with webdataset.TarWriter(str(tmp_path / "theirs.tar"), encoder=False) as writer:
        for key, sample in zip("ab", read, strict=True):
            writer.write({"__key__": key, **sample})
    found = walk((tmp_path / "theirs.tar").read_bytes())
    theirs = {member.name: member.length for member in found if isinstance(member, Member)}
    assert theirs == {name: len(content) for name, content in MEMBERS.items()}


def test_the_same_members_give_the_same_bytes(tmp_path: Path) -> None:
    assert write(tmp_path / "1.tar", MEMBERS).read_bytes() == write(tmp_path / "2.tar", MEMBERS).read_bytes()


def test_a_shard_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    def fail(writer: ShardWriter) -> None:
        with writer:
            writer.add("a.json", b"{}")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail(ShardWriter(tmp_path / "s.tar"))
    assert list(tmp_path.iterdir()) == []


def test_many_shards_are_read_with_few_open_files_from_many_threads(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n}.tar", {"a.json": str(n).encode()}) for n in range(12)]
    files, wrong = ShardFiles(max_open=3), []

    def read() -> None:
        for n in list(range(12)) * 20:
            if files.read(paths[n], 512, len(str(n))) != str(n).encode():
                wrong.append(n)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    with pytest.raises(DataError, match="expected"):
        files.read(paths[0], 1 << 20, 10)
    files.close()


def test_a_key_goes_up_to_the_first_dot_after_the_last_slash() -> None:
    assert split_name("a/b.c/0001.0.jpg") == ("a/b.c/0001", "0.jpg")
    assert split_name("0001") == ("0001", "")


def test_a_name_in_a_header_ends_at_its_first_zero_byte_and_may_have_a_prefix() -> None:
    header = bytearray(tar_header("a.json", 0))
    assert name_in_header(bytes(header)) == "a.json"
    header[50:53], header[345:348] = b"xyz", b"p/q"
    assert name_in_header(bytes(header)) == "p/q/a.json"
    header[257:265] = b"ustar  \0"  # the older GNU form, where times stand in that place
    assert name_in_header(bytes(header)) == "a.json"
