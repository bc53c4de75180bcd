# SPDX-License-Identifier: Apache-2.0
"""webdataset addresses and pipelines as sources: the same samples, and no damage that passes for the end of a shard."""

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from PIL import Image

from mindvl_data import DataError, ShardFiles, index_directory, write_shards
from mindvl_data.shards.index import open_index
from mindvl_data.shards.reading import read_samples


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (56, 28 + number), (number, 0, 0)).save(file, "PNG")
    return file.getvalue()


def sample(number: int) -> dict[str, Any]:
    turns = [{"from": "human", "value": "<image>Which?"}, {"from": "gpt", "value": str(number)}]
    kinds: list[dict[str, Any]] = [
        {"png": png(number), "txt": f"caption {number}"},
        {"0.png": png(number), "json": {"conversations": turns}},
        {"png": png(number), "json": {"question": "Which?", "answer": str(number)}},
        {"png": png(number), "txt": f"caption {number}", "json": {"url": "u", "width": 56}},
    ]
    return {"__key__": f"a/{number:04d}", **kinds[number % len(kinds)]}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    directory = tmp_path / "their shards"
    directory.mkdir()
    for shard in range(3):
        with wds.TarWriter(str(directory / f"part-{shard:03d}.tar")) as writer:
            for number in range(5 * shard, 5 * shard + 5):
                writer.write(sample(number))
    return directory


def written(source: Any, out: Path, **options: Any) -> list[tuple[dict[str, Any], tuple[bytes, ...]]]:
    """Record and media of every sample, after an index of what was written."""
    write_shards(source, out, format="webdataset", source_name="theirs", **options)
    index_directory(out)
    files = ShardFiles()
    return [
        (json.loads(raw.record), raw.media)  # type: ignore[union-attr]
        for shard in open_index(out).shards
        for raw in read_samples(shard, range(len(shard.samples)), files)
    ]


@pytest.fixture
def expected(shards: Path, tmp_path: Path) -> Any:
    """What a plain loop over the library gives."""
    urls = sorted(str(path) for path in shards.glob("*.tar"))
    rows = []
    for number, found in enumerate(wds.WebDataset(urls, shardshuffle=False)):
        image = found.get("png", found.get("0.png"))
        caption = {"content": [{"type": "image"}, f"caption {number}"]}
        asked = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": str(number)}]},
        ]
        rows.append((({"messages": asked} if number % 4 in (1, 2) else caption), (image,)))
    return rows


def meaning(found: Any) -> Any:
    return [
        ({key: value for key, value in record.items() if key in ("content", "messages")}, media)
        for record, media in found
    ]


def test_an_address_with_braces_gives_every_sample_in_order(shards: Path, expected: Any, tmp_path: Path) -> None:
    found = written(f"{shards}/part-{{000..002}}.tar", tmp_path / "out")
    assert len(found) == 15
    assert meaning(found) == expected
    assert [record["id"] for record, _ in found] == [f"a/{number:04d}" for number in range(15)]
    assert {record["source"] for record, _ in found} == {"theirs"}


def test_a_directory_several_addresses_and_compressed_shards_give_the_same(
    shards: Path, expected: Any, tmp_path: Path
) -> None:
    assert meaning(written(shards, tmp_path / "a")) == expected
    parts = sorted(shards.glob("*.tar"))
    for path, opener in zip(parts, (gzip.open, bz2.open, lzma.open), strict=True):
        with opener(f"{path}.packed", "wb") as file:
            file.write(path.read_bytes())
    assert meaning(written("::".join(f"{path}.packed" for path in parts), tmp_path / "b")) == expected


def test_a_pipeline_gives_what_it_gives(shards: Path, expected: Any, tmp_path: Path) -> None:
    urls = [str(path) for path in sorted(shards.glob("*.tar"))]
    kept = wds.WebDataset(urls, shardshuffle=False).select(lambda each: int(each["__key__"][-4:]) >= 10)
    assert meaning(written(kept, tmp_path / "out")) == expected[10:]


def test_a_pipe_runs_only_when_it_is_allowed(shards: Path, expected: Any, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    address = f"pipe:touch '{mark}'; cat '{shards}'/part-{{000..002}}.tar"
    for hidden in (address, f"{shards}/part-000.tar::{address}", f"{{{shards}/part-000.tar,pipe:touch {mark}}}"):
        with pytest.raises(DataError, match=r"a pipe: address runs a shell command.*--allow-pipe"):
            write_shards(hidden, tmp_path / "out", format="webdataset")
        assert not mark.exists()
    assert meaning(written(address, tmp_path / "out", allow_pipe=True)) == expected
    assert mark.exists()


def test_a_command_that_fails_is_no_end_of_data(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pipe:cat .*: the shard cannot be read: OSError.*exit 3"):
        write_shards(
            f"pipe:cat '{shards}/part-000.tar'; exit 3", tmp_path / "out", format="webdataset", allow_pipe=True
        )


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def address(shards: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(shards)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_http_is_read_and_a_missing_shard_is_named_without_its_password(
    shards: Path, expected: Any, address: str, tmp_path: Path
) -> None:
    assert meaning(written(f"{address}/part-{{000..002}}.tar", tmp_path / "out")) == expected
    secret = address.replace("//", "//user:pa55word@")
    with pytest.raises(DataError, match=r"//\*\*\*@127.*absent\.tar\?token=\*\*\*: the shard cannot be read") as error:
        write_shards(f"{secret}/absent.tar?token=abcdef", tmp_path / "no", format="webdataset")
    assert "pa55word" not in str(error.value)
    assert "abcdef" not in str(error.value)


def test_other_protocols_are_opened_by_fsspec(shards: Path, expected: Any, tmp_path: Path) -> None:
    import fsspec

    for path in shards.glob("*.tar"):
        fsspec.filesystem("memory").pipe(f"/bucket/{path.name}", path.read_bytes())
    assert meaning(written("memory://bucket/part-{000..002}.tar", tmp_path / "out")) == expected
    with pytest.raises(DataError, match=r"no-such-thing://a\.tar: the shard cannot be opened"):
        write_shards("no-such-thing://a.tar", tmp_path / "no", format="webdataset")


def cut_before_the_end_mark(content: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        last = tar.getmembers()[-1]
    return content[: last.offset_data + -(-last.size // 512) * 512]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_before_the_end_mark, "truncated shard: the end-of-archive marker is missing"),
        (lambda content: content[:3000], "the shard cannot be read: ReadError"),
        (
            lambda content: content[:1024] + b"\xff" * 512 + content[1536:],
            "(damaged header|the shard cannot be read: ReadError: bad)",
        ),
        (
            lambda content: content[:2048] + bytes(1024) + content[3072:],
            "damaged header, or data after the end-of-archive marker",
        ),
        (lambda content: gzip.compress(content)[:-500], "the shard cannot be read: EOFError"),
        (lambda content: b"", "the shard cannot be read: ReadError: empty file"),
        (lambda content: b"<html>not found</html>" * 100, "the shard cannot be read: ReadError"),
    ],
)
def test_damage_is_refused_and_never_taken_for_the_end(damage: Any, message: str, shards: Path, tmp_path: Path) -> None:
    damaged = shards / "part-001.tar"
    damaged.write_bytes(damage(damaged.read_bytes()))
    with pytest.raises(DataError, match=rf"part-001\.tar: {message}"):
        write_shards(f"{shards}/part-{{000..002}}.tar", tmp_path / "out", format="webdataset")


def test_a_link_a_huge_member_and_a_name_that_stands_twice_are_refused(tmp_path: Path) -> None:
    def shard(*members: tuple[str, int, bytes]) -> str:
        path = tmp_path / "a.tar"
        with tarfile.open(path, "w") as tar:
            for name, size, kind in members:
                info = tarfile.TarInfo(name)
                info.size, info.type = size, kind
                tar.addfile(info, io.BytesIO(bytes(size)))
        return str(path)

    plain = tarfile.REGTYPE
    source = shard(("0.txt", 1, plain), ("0.png", 0, tarfile.SYMTYPE))
    with pytest.raises(DataError, match=r"member '0.png' is not a regular file"):
        write_shards(source, tmp_path / "out", format="webdataset")
    source = shard(("0.txt", 1, plain), ("0.txt", 1, plain))
    with pytest.raises(DataError, match="duplicate file name"):
        write_shards(source, tmp_path / "out", format="webdataset")
    header = tarfile.TarInfo("0.png")
    header.size = 5 << 30
    (tmp_path / "b.tar").write_bytes(header.tobuf() + bytes(1024))
    with pytest.raises(DataError, match=r"member '0.png' has 5368709120 bytes"):
        write_shards(tmp_path / "b.tar", tmp_path / "out", format="webdataset")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"png": png(1)}, "expected one record .*, got 0"),
        ({"txt": "a", "cls": b"1"}, "extension of member .* must be one of"),
        ({"txt": b"a", "png": Image.new("RGB", (3, 3))}, r"field 'png' must be bytes, got Image.*Remove decode\(\)"),
        ({"json": {"a": object()}}, "field 'json' is not valid JSON"),
        ({"json": b"{"}, "the record cannot be parsed"),
        ({"json": b"[" * 100_000}, "the record cannot be parsed"),
        ({"json": {"url": "u"}}, "expected a conversation"),
        ({"txt": b"\xff"}, "the record cannot be parsed"),
        ({"txt": "a \udcff"}, "the record cannot be parsed"),
        ({"json": {"messages": 5}}, "`messages`"),
    ],
)
def test_a_bad_sample_is_named_and_may_be_left_out(fields: Any, message: str, tmp_path: Path) -> None:
    pipeline = [{"__key__": "k1", "__url__": "s3://me:secret@b/a.tar", **fields}, sample(0)]
    with pytest.raises(DataError, match=message) as error:
        write_shards(pipeline, tmp_path / "out", format="webdataset")
    assert "s3://***@b/a.tar:k1" in str(error.value)
    result = write_shards(pipeline, tmp_path / "out", format="webdataset", skip_bad=True)
    assert (result.samples, result.excluded) == (1, 1)
    assert "secret" not in (tmp_path / "out" / "excluded.jsonl").read_text()


def test_what_is_no_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"sample 1 must be a dict with __key__, got tuple\. Remove to_tuple"):
        write_shards([("a", "b")], tmp_path / "out", format="webdataset")  # type: ignore[list-item]
    with pytest.raises(DataError, match="the source does not exist"):
        write_shards([sample(0)], tmp_path / "out", format="llava")


@pytest.mark.parametrize("address", ["a-{0..99999999999}.tar", "a-{0..9999999}.tar", "a-{0,{1}.tar", "${NOT_SET}.tar"])
def test_braces_that_cannot_be_meant_are_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"braces|cannot be expanded|cannot be read"):
        write_shards(address, tmp_path / "out", format="webdataset")


def test_a_stopped_write_continues_with_an_address_and_not_with_a_pipeline(shards: Path, tmp_path: Path) -> None:
    source, out = f"{shards}/part-{{000..002}}.tar", tmp_path / "out"
    damaged = shards / "part-002.tar"
    content, times = damaged.read_bytes(), damaged.stat()
    damaged.write_bytes(content[:700] + b"\xff" * (len(content) - 700))
    os.utime(damaged, ns=(times.st_atime_ns, times.st_mtime_ns))
    options: dict[str, Any] = {"format": "webdataset", "samples_per_shard": 5}
    with pytest.raises(DataError, match=r"part-002\.tar"):
        write_shards(source, out, **options)
    first = (out / "shard-000000.tar").stat().st_mtime_ns
    with pytest.raises(DataError, match=r"the interrupted write cannot be resumed.*--fresh"):
        write_shards([sample(number) for number in range(15)], out, **options)
    damaged.write_bytes(content)
    os.utime(damaged, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert write_shards(source, out, **options).samples == 15
    assert (out / "shard-000000.tar").stat().st_mtime_ns == first
