# SPDX-License-Identifier: Apache-2.0
"""Scanning: what others wrote is read, damage is named, and what is sound after it is found again."""

import io
import tarfile
from pathlib import Path

import pytest

from mindvl_data import DataError
from mindvl_data.shards.scan import Damage, walk
from mindvl_data.shards.tar import Member, ShardWriter

MEMBERS = {"a.json": b"{}", "a.0.png": bytes(700), "b.json": b"x" * 512}


def write(path: Path, members: dict[str, bytes] = MEMBERS) -> Path:
    with ShardWriter(path) as writer:
        for name, content in members.items():
            writer.add(name, content)
    return path


def scan_members(path: Path) -> list[Member]:
    """The members of a shard; raises the error of the first damaged part."""
    found = list(walk(path.read_bytes()))
    for item in found:
        if isinstance(item, Damage):
            raise item.error(path)
    return [item for item in found if isinstance(item, Member)]


def fix_checksum(content: bytearray, offset: int) -> None:
    header = content[offset : offset + 512]
    header[148:156] = b" " * 8
    content[offset + 148 : offset + 156] = b"%06o\0 " % sum(header)


def names(content: bytes) -> list[str | None]:
    """Member names in order; None for a damaged part of unknown key, `!key` for one of a known key."""
    found = list(walk(content))
    return [f.name if isinstance(f, Member) else None if f.key is None else f"!{f.key}" for f in found]


def test_we_read_the_shards_of_a_standard_writer(tmp_path: Path) -> None:
    for name, content in MEMBERS.items():
        (tmp_path / name).write_bytes(content)
    with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for name in MEMBERS:
            archive.add(tmp_path / name, name)
    assert [(m.name, m.length) for m in scan_members(tmp_path / "s.tar")] == [(n, len(c)) for n, c in MEMBERS.items()]


def test_names_of_extended_headers_are_read_in_both_forms(tmp_path: Path) -> None:
    long = "d/" * 60 + "a.json"  # 126 characters, more than a plain header holds
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT):
        with tarfile.open(tmp_path / "s.tar", "w", format=form) as archive:
            for name in ("x.txt", long, "y.txt"):
                info = tarfile.TarInfo(name)
                info.size, info.mtime = 2, 1.5 if form == tarfile.PAX_FORMAT else 1
                archive.addfile(info, io.BytesIO(b"{}"))
        assert [(m.name, m.length) for m in scan_members(tmp_path / "s.tar")] == [("x.txt", 2), (long, 2), ("y.txt", 2)]


def test_an_extended_header_that_changes_sizes_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"path": "z"}) as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    with pytest.raises(DataError, match="extended header sets path"):
        scan_members(tmp_path / "s.tar")
    path = write(tmp_path / "t.tar", {"p": b"12 size=999\n", "a.txt": b"a"})
    content = bytearray(path.read_bytes())
    content[156:157] = b"x"
    fix_checksum(content, 0)
    assert names(bytes(content)) == [None, "a.txt"]
    content[512:514] = b"99"  # a length that does not fit
    assert names(bytes(content)) == [None, "a.txt"]


def test_directories_inside_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"a")
    with tarfile.open(tmp_path / "s.tar", "w") as archive:
        archive.add(tmp_path / "in", ".")
    assert [(m.name, m.key) for m in scan_members(tmp_path / "s.tar")] == [("./a.txt", "./a")]


@pytest.mark.parametrize("byte", [0, 100, 124, 148, 156, 300])
def test_a_flipped_header_bit_is_refused_with_file_and_offset(tmp_path: Path, byte: int) -> None:
    path = write(tmp_path / "s.tar", MEMBERS)
    second = scan_members(path)[1].offset - 512
    content = bytearray(path.read_bytes())
    content[second + byte] ^= 4
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"s\.tar at byte {second}: .*checksum is wrong"):
        scan_members(path)


@pytest.mark.parametrize("keep", [100, 512, 1024, 1500, 2048, 3000])
def test_a_truncated_shard_is_refused(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "s.tar", MEMBERS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="truncated shard"):
        scan_members(path)


def test_data_after_the_end_mark_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "s.tar", MEMBERS)
    path.write_bytes(path.read_bytes() + path.read_bytes())
    with pytest.raises(DataError, match="after the end-of-archive marker"):
        scan_members(path)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("a", tarfile.SYMTYPE, "not a regular file"),
        ("a", tarfile.LNKTYPE, "not a regular file"),
        ("a", tarfile.CHRTYPE, "not a regular file"),
        ("a", tarfile.BLKTYPE, "not a regular file"),
        ("a", tarfile.FIFOTYPE, "not a regular file"),
        ("../a", tarfile.REGTYPE, "is empty, absolute or contains"),
        ("b/../../a", tarfile.REGTYPE, "is empty, absolute or contains"),
        ("/a", tarfile.REGTYPE, "is empty, absolute or contains"),
    ],
)
def test_links_devices_and_names_that_leave_the_archive_are_refused(
    tmp_path: Path, name: str, kind: bytes, message: str
) -> None:
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "b" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
        archive.addfile(info)
        archive.addfile(tarfile.TarInfo("z.txt"))
    with pytest.raises(DataError, match=message):
        scan_members(path)
    assert names(path.read_bytes()) == [f"!{name}", "z.txt"]


def test_a_member_that_claims_too_much_is_refused(tmp_path: Path) -> None:
    content = bytearray(write(tmp_path / "s.tar").read_bytes())
    content[124:136] = b"%011o\0" % (1 << 31)
    fix_checksum(content, 0)
    (tmp_path / "s.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"expected 2147483648 bytes for member .*, got 4096"):
        scan_members(tmp_path / "s.tar")
    content[124:136] = b"x" * 12
    fix_checksum(content, 0)
    assert names(bytes(content)) == [None, "a.0.png", "b.json"]


def test_after_damage_the_next_sound_header_is_found(tmp_path: Path) -> None:
    sound = write(tmp_path / "s.tar").read_bytes()
    flipped = bytearray(sound)
    flipped[1024] ^= 1  # the header of a.0.png
    assert names(bytes(flipped)) == ["a.json", None, "b.json"]
    wiped = bytearray(sound)
    wiped[1024:1536] = bytes(512)
    assert names(bytes(wiped)) == ["a.json", None, "b.json"]
    assert names(sound + sound) == [*MEMBERS, None, *MEMBERS]
    assert names(sound[:3100]) == ["a.json", "a.0.png", "!b"]
    assert names(sound[:2560]) == ["a.json", "a.0.png", None]
    assert names(b"") == [None]


def test_bytes_lost_or_gained_inside_a_member_damage_that_member_alone(tmp_path: Path) -> None:
    sound = write(tmp_path / "s.tar").read_bytes()
    assert names(sound[:1600] + b"abc" + sound[1600:]) == ["a.json", "a.0.png", None, "!a", "b.json"]
    assert names(sound[:1600] + sound[1700:]) == ["a.json", "a.0.png", None, "!a", "b.json"]
    assert names(sound[:1600] + sound[2112:]) == ["a.json", "a.0.png", None, "!a", "b.json"]
    assert [f.what for f in walk(sound[:1600] + sound[2112:]) if isinstance(f, Damage)][1].endswith("gained bytes")
