# SPDX-License-Identifier: Apache-2.0
"""Indexing a directory: what it leaves on disk, how it continues, and what no damage may do."""

import io
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mindvl_data import DataConfig, DataError, ImageConfig, Loader, PackingConfig, SourceConfig, index_directory
from mindvl_data.errors import SampleError
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import open_index
from mindvl_data.shards.index_format import hash_key
from mindvl_data.shards.reading import read_samples
from mindvl_data.shards.scan import walk
from mindvl_data.shards.tar import Member, ShardWriter

Mutation = Callable[[bytearray], bytearray]


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), (number, 0, 0)).save(file, "PNG")
    return file.getvalue()


def asked(text: str) -> bytes:
    shown = [{"type": "image"}, text]
    messages = [{"role": "user", "content": shown}, {"role": "assistant", "content": "!"}]
    return json.dumps({"messages": messages}).encode()


def write(path: Path, *members: tuple[str, bytes]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with ShardWriter(path) as writer:
        for name, content in members:
            writer.add(name, content)
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def records(directory: Path) -> dict[str, bytes]:
    """Key and record of every indexed sample, read back and checked against the index."""
    found: dict[str, bytes] = {}
    files = ShardFiles()
    for shard in open_index(directory).shards:
        for row, raw in enumerate(read_samples(shard, list(range(len(shard.samples))), files)):
            assert not isinstance(raw, SampleError), raw
            assert hash_key(raw.key) == int(shard.samples["key_hash"][row])
            found[raw.key] = raw.record
    files.close()
    return found


def test_indexing_twice_reads_nothing_again_and_gives_the_same_files(shard_directories: dict[str, Path]) -> None:
    directory, calls = shard_directories["text"], list[int]()
    before = contents(directory)
    index_directory(directory, progress=lambda done, total: calls.append(done))
    assert (contents(directory), calls) == (before, [])
    index_directory(directory, fresh=True, progress=lambda done, total: calls.append(done))
    assert (contents(directory), len(calls)) == (before, 3)


def test_only_shards_that_changed_are_read_again(tmp_path: Path) -> None:
    directory, calls = tmp_path / "s", list[int]()
    for name in "abc":
        write(directory / f"{name}.tar", (f"{name}.txt", b"x"))
    index_directory(directory)
    before = {path.name: path.stat() for path in directory.glob("*.idx")}
    write(directory / "b.tar", ("b.txt", b"x"), ("d.txt", b"y"))
    assert index_directory(directory, progress=lambda done, total: calls.append(done))["samples"] == 4
    assert len(calls) == 1
    assert [name for name, status in before.items() if (directory / name).stat() != status] == ["b.idx"]
    (directory / "a.idx").write_bytes(b"damaged")
    index_directory(directory, progress=lambda done, total: calls.append(done))
    assert len(calls) == 2
    assert index_directory(directory, decode=True, progress=lambda done, total: calls.append(done))["samples"] == 4
    assert len(calls) == 5  # other rules, so everything is looked at again


def test_a_stopped_index_continues_and_until_then_there_is_none(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    for name in "abc":
        write(directory / f"{name}.tar", (f"{name}.txt", b"x"))
    (directory / "c.tar").write_bytes((directory / "c.tar").read_bytes()[:600])
    with pytest.raises(DataError, match=r"c\.tar at byte .*truncated shard"):
        index_directory(directory)
    assert not (directory / "manifest.json").exists()
    with open(directory / "indexing.jsonl", "a") as file:
        file.write('{"facts": {"na')  # as a kill leaves it
    write(directory / "c.tar", ("c.txt", b"x"))
    calls: list[int] = []
    assert index_directory(directory, progress=lambda done, total: calls.append(done))["samples"] == 3
    assert len(calls) == 1
    assert not (directory / "indexing.jsonl").exists()


def test_several_processes_give_the_same_files_and_the_same_refusal(tmp_path: Path) -> None:
    for name in "abc":
        write(tmp_path / "1" / f"{name}.tar", (f"{name}.json", asked(name)), (f"{name}.0.png", png(1)), ("x.pkl", b""))
    shutil.copytree(tmp_path / "1", tmp_path / "2")
    for number in (1, 2):
        index_directory(tmp_path / str(number), workers=number, exclude_bad=True)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    for number in (1, 2):
        with pytest.raises(DataError, match=r"a\.tar at byte .*'x.pkl' must be"):
            index_directory(tmp_path / str(number), workers=number)


def test_a_duplicate_in_another_shard_is_refused_or_left_out(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    write(directory / "1.tar", ("a.json", asked("1")), ("a.0.png", png(1)))
    write(directory / "2.tar", ("b.txt", b"2"), ("a.txt", b"3"), ("c.txt", b"4"))
    with pytest.raises(DataError, match=r"2\.tar at byte 1024: sample 'a': duplicate key, already in 1\.tar"):
        index_directory(directory)
    for _ in range(2):
        manifest = index_directory(directory, exclude_bad=True)
        assert [manifest[name] for name in ("samples", "images", "excluded")] == [3, 1, 1]
        assert list(records(directory)) == ["a", "b", "c"]
        (line,) = lines(directory / "excluded.jsonl")
        assert (line["shard"], line["key"], line["offset"]) == ("2.tar", "a", 1024)
    (directory / "1.tar").unlink()
    assert index_directory(directory, exclude_bad=True)["samples"] == 3
    assert not (directory / "excluded.jsonl").exists()


def test_a_shard_without_a_usable_sample_is_left_out_whole(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    write(directory / "1.tar", ("a.pkl", b""))
    with pytest.raises(DataError, match=r"none of the 1 shards has a valid sample; .* member .a\.pkl"):
        index_directory(directory, exclude_bad=True)
    write(directory / "2.tar", ("b.txt", b"2"))
    manifest = index_directory(directory, exclude_bad=True)
    assert [entry["name"] for entry in manifest["shards"]] == ["2.tar"]
    assert (manifest["samples"], manifest["excluded"], list(records(directory))) == (1, 1, ["b"])


def test_directories_of_energon_and_of_webdataset_are_indexed_without_a_change(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    (directory / ".nv-meta").mkdir(parents=True)
    (directory / ".nv-meta/.info.yaml").write_text("shard_counts: {}")
    with webdataset.TarWriter(str(directory / "shard_0.tar"), encoder=False) as writer:
        turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "!"}]
        writer.write({"__key__": "v1.0/d/0", "jpg": png(1), "json": json.dumps(turns).encode()})
        writer.write({"__key__": "d/1", "jpg": png(2), "txt": b"a cat"})
        writer.write({"__key__": "d/2", "json": b'{"context": "?", "answers": ["!"]}', "png": png(3)})
    (directory / "shard_0.tar.idx").write_bytes(b"energon's own")
    before = contents(directory / ".nv-meta") | {"tar": (directory / "shard_0.tar").read_bytes()}
    assert index_directory(directory)["images"] == 3
    assert list(records(directory)) == ["v1.0/d/0", "d/1", "d/2"]
    assert contents(directory / ".nv-meta") | {"tar": (directory / "shard_0.tar").read_bytes()} == before
    assert (directory / "shard_0.tar.idx").read_bytes() == b"energon's own"


def test_rows_left_out_when_writing_stay_named(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    write(directory / "1.tar", ("a.txt", b"x"), ("b.pkl", b""))
    (directory / "excluded.jsonl").write_text('{"file": "f", "row": 1, "reason": "r"}\n')
    assert index_directory(directory, exclude_bad=True)["excluded"] == 1
    assert [line.get("row", line.get("key")) for line in lines(directory / "excluded.jsonl")] == [1, "b"]


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    write(tmp_path / "s/1.tar", ("a.txt", b"x"))
    (tmp_path / "s/1.idx").mkdir()
    with pytest.raises(DataError, match=r"1\.idx: the index cannot be written: Is a directory"):
        index_directory(tmp_path / "s")


def test_a_name_of_a_shard_that_is_no_file_is_refused_without_reading(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(DataError, match=r"pipe\.tar: the path is not a regular file"):
        index_directory(tmp_path)
    (tmp_path / "pipe.tar").unlink()
    (tmp_path / "lost.tar").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"lost\.tar: the path is a link to a file that does not exist"):
        index_directory(tmp_path)


def test_an_index_can_be_read_by_the_words_of_the_document(tmp_path: Path) -> None:
    """docs/reference/data-format.md, "NAME.idx", in a few lines of struct."""
    directory = tmp_path / "s"
    limits = json.loads(asked("x")) | {"min_pixels": 1000, "max_pixels": 2000}
    write(directory / "s.tar", ("a.0.png", png(1)), ("a.json", json.dumps(limits).encode()), ("b.txt", b"text"))
    index_directory(directory)
    content, shard = (directory / "s.idx").read_bytes(), (directory / "s.tar").read_bytes()
    magic, num_samples, num_members, shard_bytes = struct.unpack_from("<8sQQQ", content)
    assert (magic, num_samples, num_members, shard_bytes) == (b"MVLIDX02", 2, 3, len(shard))
    samples = [struct.unpack_from("<QIIHBBQIII", content, 32 + 40 * n) for n in range(num_samples)]
    members = [struct.unpack_from("<QIIIIf", content, 32 + 40 * num_samples + 28 * n) for n in range(num_members)]
    assert len(content) == 32 + 40 * num_samples + 28 * num_members
    image = shard.index(png(1))
    record = shard.index(b'{"messages"')
    end = shard.index(b"}", shard.index(b"max_pixels")) + 1
    assert samples[0][:6] == (image, end - image, 0, 2, 0, 1)
    assert samples[0][8:] == (1000, 2000)
    assert members[0] == (record, end - record, 0, 0, 0, 0.0)
    assert members[1] == (image, len(png(1)), 30, 40, 0, 0.0)
    assert samples[1][:6] == (shard.index(b"text\0"), 4, 2, 1, 0, 0)
    code = "import sys, zlib; print(zlib.crc32(sys.stdin.buffer.read()))"
    text = shard[record:end] + png(1)
    assert samples[0][7] == int(subprocess.run([sys.executable, "-c", code], input=text, capture_output=True).stdout)


# What damage may do, drawn at random. Three samples say how many images they have, two are plain captions.
MEMBERS = (
    ("a.json", asked("a")), ("a.0.png", png(1)),
    ("b.txt", b"text of b"), ("b.png", png(2)),
    ("c.json", asked("c")), ("c.0.png", png(3)),
    ("d.txt", b"text of d"),
    ("e.json", asked("e")), ("e.0.png", png(4)),
)  # fmt: skip
RECORDS = {name.split(".")[0]: content for name, content in MEMBERS if name.endswith(("json", "txt"))}
CAPTIONS = {"b", "d"}


@contextmanager
def directory_of(content: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "s.tar").write_bytes(content)
        yield Path(directory)


def sound_shard() -> tuple[bytes, list[tuple[str, int]]]:
    """A shard, and (key, offset of the header) of each member."""
    with tempfile.TemporaryDirectory() as directory:
        path = write(Path(directory) / "s.tar", *MEMBERS)
        members = [found for found in walk(path.read_bytes()) if isinstance(found, Member)]
        return path.read_bytes(), [(member.key, member.offset - 512) for member in members]


SOUND, HEADERS = sound_shard()
places = st.integers(0, len(SOUND) - 1)


def index_or_refusal(directory: Path, **options: bool) -> dict[str, Any] | str:
    """The manifest, or the error message instead; any other error than a DataError ends the test."""
    try:
        return index_directory(directory, **options)  # type: ignore[arg-type]
    except DataError as error:
        return str(error)


def flip(place: int, bit: int) -> Mutation:
    def mutate(content: bytearray) -> bytearray:
        if place < len(content):
            content[place] ^= 1 << bit
        return content

    return mutate


def replace(start: int, length: int, new: bytes) -> Mutation:
    return lambda content: content[:start] + new + content[start + length :]


def swap_blocks(one: int, other: int) -> Mutation:
    def mutate(content: bytearray) -> bytearray:
        first, second = (slice(512 * n, 512 * n + 512) for n in (one, other))
        content[first], content[second] = content[second], content[first]
        return content

    return mutate


mutations = st.lists(
    st.one_of(
        st.builds(flip, places, st.integers(0, 7)),
        st.builds(flip, st.sampled_from([offset for _, offset in HEADERS]).map(lambda o: o + 5), st.integers(0, 7)),
        st.builds(replace, places, st.just(0), st.binary(min_size=1, max_size=60)),
        st.builds(replace, places, st.integers(1, 511), st.just(b"")),
        st.builds(replace, places, st.just(len(SOUND)), st.just(b"")),
        st.builds(swap_blocks, st.integers(0, len(SOUND) // 512 - 1), st.integers(0, len(SOUND) // 512 - 1)),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None, derandomize=True)
@given(mutations=mutations)
def test_a_damaged_shard_is_refused_by_name_or_every_sample_reads_back(mutations: list[Mutation]) -> None:
    content = bytearray(SOUND)
    for mutate in mutations:
        content = mutate(content)
    with directory_of(bytes(content)) as directory:
        strict = index_or_refusal(directory)
        if isinstance(strict, str):
            assert str(directory) in strict
            assert not (directory / "manifest.json").exists()
        else:
            assert records(directory).keys() == RECORDS.keys()
        manifest = index_or_refusal(directory, exclude_bad=True)
        if isinstance(manifest, str):
            assert "has a valid sample" in manifest
            return
        found = records(directory)
        assert len(found) == manifest["samples"]
        if found.keys() != RECORDS.keys():  # nothing is lost without a line that says so
            assert manifest["excluded"] == len(lines(directory / "excluded.jsonl")) > 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    hits=st.dictionaries(
        st.sampled_from(HEADERS), st.tuples(st.integers(0, 147), st.integers(0, 7)), min_size=1, max_size=4
    ),
    keep=st.one_of(st.none(), st.integers(512, len(SOUND) - 1025)),
)
def test_what_is_left_of_a_damaged_shard_is_exactly_what_is_whole(
    hits: dict[tuple[str, int], tuple[int, int]], keep: int | None
) -> None:
    content = bytearray(SOUND)
    for (_, offset), (place, bit) in hits.items():
        content[offset + place] ^= 1 << bit
    end = len(content) if keep is None else keep
    sizes = {offset: length for (_, offset), (_, length) in zip(HEADERS, _lengths(), strict=True)}
    cut = {key for key, offset in HEADERS if offset + 512 + sizes[offset] > end}
    whole = RECORDS.keys() - {key for key, _ in hits} - cut
    with directory_of(bytes(content[:end])) as directory:
        manifest = index_or_refusal(directory, exclude_bad=True)
        assert isinstance(manifest, dict) or "has a valid sample" in manifest
        found = records(directory) if isinstance(manifest, dict) else {}
        assert found.items() <= {key: RECORDS[key] for key in whole}.items()
        assert whole - found.keys() <= CAPTIONS  # they may have lost an image, which cannot be detected
        with pytest.raises(DataError, match=r"s\.tar at byte"):
            index_directory(directory)


def _lengths() -> list[tuple[str, int]]:
    return [(name, len(content)) for name, content in MEMBERS]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(order=st.permutations(range(len(MEMBERS))))
def test_members_in_any_order_are_whole_samples_or_named(order: list[int]) -> None:
    with tempfile.TemporaryDirectory() as root:
        directory = write(Path(root) / "f/s.tar", *(MEMBERS[n] for n in order)).parent
        keys = [MEMBERS[n][0].split(".")[0] for n in order]
        runs = [key for n, key in enumerate(keys) if n == 0 or keys[n - 1] != key]
        together = {key for key in runs if runs.count(key) == 1}
        manifest = index_or_refusal(directory, exclude_bad=True)
        assert isinstance(manifest, dict) or "has a valid sample" in manifest
        found = records(directory) if isinstance(manifest, dict) else {}
        assert found == {key: RECORDS[key] for key in together}


def test_an_index_that_is_killed_continues(tmp_path: Path) -> None:
    for number in range(30):
        write(tmp_path / f"s/{number:02d}.tar", *((f"{number}-{n}.txt", b"x" * 99) for n in range(40)))
    shutil.copytree(tmp_path / "s", tmp_path / "t")
    whole = index_directory(tmp_path / "s")

    def die(done: int, total: int) -> None:
        if len(list((tmp_path / "t").glob("*.idx"))) >= 5:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        with suppress(BaseException):
            index_directory(tmp_path / "t", progress=die)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not (tmp_path / "t/manifest.json").exists()
    calls: list[int] = []
    assert index_directory(tmp_path / "t", progress=lambda done, total: calls.append(done)) == whole
    assert 0 < len(calls) <= 26
    assert contents(tmp_path / "t") == contents(tmp_path / "s")


@pytest.mark.slow
@settings(max_examples=4, deadline=None, derandomize=True)
@given(damage=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=40)), max_size=12))
def test_a_loader_over_shards_damaged_after_indexing_keeps_lengths_and_ranks_equal(
    damage: list[tuple[float, bytes]],
    tokenizer_directory: Path,
    shard_directories: dict[str, Path],
) -> None:
    def batches(sources: tuple[SourceConfig, ...], rank: int = 0, ranks: int = 1) -> list[Any]:
        config = DataConfig(
            sources=sources,
            tokenizer=tokenizer_directory,
            packing=PackingConfig(seq_length=256, buffer_size=16),
            image=ImageConfig(min_pixels=28 * 28, max_pixels=84 * 84),
            max_failed_share=1.0,
            num_threads=0,
        )
        with Loader(config, global_batch_size=2, dp_rank=rank, dp_size=ranks, position_kind="rope") as loader:
            return [next(loader) for _ in range(8 // ranks)]

    with tempfile.TemporaryDirectory() as root:
        for name, directory in shard_directories.items():
            shutil.copytree(directory, Path(root) / name)
        shards = sorted(Path(root).glob("*/*.tar"))
        for share, new in damage:
            path = shards[int(share * len(shards))]
            content = bytearray(path.read_bytes())
            place = int((share * 7919) % 1 * (len(content) - len(new)))
            content[place : place + len(new)] = new
            path.write_bytes(content)
        damaged = tuple(SourceConfig(name=name, path=Path(root) / name) for name in shard_directories)
        sound = tuple(SourceConfig(name=name, path=path) for name, path in shard_directories.items())
        wanted, alone = batches(sound), batches(damaged)
        by_rank = [batches(damaged, rank, 2) for rank in range(2)]
        together = [batch for step in zip(*by_rank, strict=True) for batch in step]
    for planned, met, divided in zip(wanted, alone, together, strict=True):
        assert planned.cu_seqlens.tolist() == met.cu_seqlens.tolist() == divided.cu_seqlens.tolist()
        assert met.input_ids.tolist() == divided.input_ids.tolist()
        for number, segment in enumerate(met.samples):
            assert (segment.source, segment.sample_index) == (
                planned.samples[number].source,
                planned.samples[number].sample_index,
            )
            here = slice(int(met.cu_seqlens[number]), int(met.cu_seqlens[number + 1]))
            if segment.failed:
                assert (met.labels[here] == -100).all()
            else:
                assert met.labels[here].tolist() == planned.labels[here].tolist()
