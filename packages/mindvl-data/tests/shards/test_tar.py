# SPDX-License-Identifier: Apache-2.0
"""Shards: bytes that others can read, damage that is named."""

import io
import tarfile
import threading
from pathlib import Path

import pytest
import webdataset

from mindvl_data import DataError
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.tar import ShardWriter, scan_members


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
    theirs = {member.name: member.length for member in scan_members(tmp_path / "theirs.tar")}
    assert theirs == {name: len(content) for name, content in MEMBERS.items()}


def test_we_read_the_shards_of_a_standard_writer(tmp_path: Path) -> None:
    for name, content in MEMBERS.items():
        (tmp_path / name).write_bytes(content)
    with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for name in MEMBERS:
            archive.add(tmp_path / name, name)
    assert [(m.name, m.length) for m in scan_members(tmp_path / "s.tar")] == [(n, len(c)) for n, c in MEMBERS.items()]


def test_extended_headers_with_times_are_passed_over_and_those_with_names_refused(tmp_path: Path) -> None:
    for name, key in (("times.tar", "a"), ("names.tar", "\u00fc" * 60)):
        with tarfile.open(tmp_path / name, "w", format=tarfile.PAX_FORMAT) as archive:
            info = tarfile.TarInfo(f"{key}.json")
            info.mtime, info.size = 1.5, 2
            archive.addfile(info, io.BytesIO(b"{}"))
    assert [(m.name, m.length) for m in scan_members(tmp_path / "times.tar")] == [("a.json", 2)]
    with pytest.raises(DataError, match="extended header sets path"):
        list(scan_members(tmp_path / "names.tar"))


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


@pytest.mark.parametrize("byte", [0, 100, 124, 148, 156, 300])
def test_a_flipped_header_bit_is_refused_with_file_and_offset(tmp_path: Path, byte: int) -> None:
    path = write(tmp_path / "s.tar", MEMBERS)
    second = list(scan_members(path))[1].offset - 512
    content = bytearray(path.read_bytes())
    content[second + byte] ^= 4
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"checksum is wrong.*s\.tar at byte {second}"):
        list(scan_members(path))


@pytest.mark.parametrize("keep", [100, 512, 1024, 1500, 2048, 3000])
def test_a_truncated_shard_is_refused(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "s.tar", MEMBERS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="truncated shard"):
        list(scan_members(path))


def test_data_after_the_end_mark_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "s.tar", MEMBERS)
    path.write_bytes(path.read_bytes() + path.read_bytes())
    with pytest.raises(DataError, match="after the end mark"):
        list(scan_members(path))


def test_links_and_names_that_leave_the_archive_are_refused(tmp_path: Path) -> None:
    for number, (name, kind) in enumerate([("a", tarfile.SYMTYPE), ("../a", tarfile.REGTYPE), ("/a", tarfile.REGTYPE)]):
        path = tmp_path / f"{number}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "b" if kind == tarfile.SYMTYPE else ""
            archive.addfile(info)
        with pytest.raises(DataError, match=r"not a plain file|leaves the archive"):
            list(scan_members(path))


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
    with pytest.raises(DataError, match="wanted"):
        files.read(paths[0], 1 << 20, 10)
    files.close()
