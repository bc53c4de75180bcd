# SPDX-License-Identifier: Apache-2.0
"""Writing: the same bytes every time, images untouched, refusals by file and row."""

import base64
import io
import json
import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mindvl_data import DataError, index_directory, write_shards
from mindvl_data.formats.downloads import Downloads
from mindvl_data.shards.index import open_index
from mindvl_data.shards.scan import walk
from mindvl_data.shards.tar import Member
from mindvl_data.shards.write import WriteProgress, Written


def jpeg(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (number * 20, 0, 0)).save(file, "JPEG")
    return file.getvalue()


def source(directory: Path, count: int = 5) -> Path:
    directory.mkdir()
    rows = []
    for number in range(count):
        (directory / f"{number}.dat").write_bytes(jpeg(number))
        turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": str(number)}]
        rows.append({"id": number, "image": f"{number}.dat", "conversations": turns, "split": "train"})
    (directory / "rows.json").write_text(json.dumps(rows))
    return directory / "rows.json"


def test_samples_are_cut_into_shards_and_images_copied_byte_for_byte(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    written = write_shards(
        source(tmp_path / "raw"),
        tmp_path / "digits",
        format="llava",
        samples_per_shard=2,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert written == Written(samples=5, excluded=0)
    assert calls == [(n, 5) for n in range(1, 6)]
    shards = sorted((tmp_path / "digits").iterdir())
    assert [s.name for s in shards] == [f"shard-00000{n}.tar" for n in range(3)]
    members = [found for found in walk(shards[1].read_bytes()) if isinstance(found, Member)]
    assert [m.name for m in members] == [f"{k:09d}.{e}" for k in (2, 3) for e in ("json", "0.jpg")]
    content = shards[1].read_bytes()
    record, image = (content[m.offset : m.offset + m.length] for m in members[:2])
    assert image == jpeg(2)
    assert json.loads(record) == {
        "source": "digits",
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "2"}]},
        ],
        "id": "2",
        "meta": {"split": "train"},
    }


def test_the_same_source_gives_the_same_shards(tmp_path: Path) -> None:
    rows = source(tmp_path / "raw")
    for out in ("1", "2"):
        write_shards(rows, tmp_path / out, format="llava", source_name="digits")
    assert (tmp_path / "1/shard-000000.tar").read_bytes() == (tmp_path / "2/shard-000000.tar").read_bytes()


def test_a_directory_with_shards_is_not_written_again(tmp_path: Path) -> None:
    rows = source(tmp_path / "raw")
    write_shards(rows, tmp_path / "out", format="llava")
    with pytest.raises(DataError, match="already holds shards"):
        write_shards(rows, tmp_path / "out", format="llava")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": "missing.png"}, "cannot be read"),
        ({"image": "rows.json"}, "is not JPEG, PNG, WebP, GIF"),
        ({"image": []}, "mentions 1 images, but the sample has 0"),
        ({"conversations": [{"from": "human", "value": "<image>"}]}, "no assistant message"),
    ],
)
def test_a_row_that_cannot_be_written_is_named_and_leaves_no_half_shard(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = source(tmp_path / "raw")
    rows = json.loads(path.read_text())
    rows[3] |= change
    path.write_text(json.dumps(rows))
    with pytest.raises(DataError, match=rf"rows\.json row 4: .*{message}"):
        write_shards(path, tmp_path / "out", format="llava")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["writing"]


def test_every_invalid_row_is_listed_at_once_with_the_option_that_excludes_them(tmp_path: Path) -> None:
    path = source(tmp_path / "raw")
    rows = json.loads(path.read_text())
    rows[1] |= {"image": "missing.png"}
    rows[4] = 7
    path.write_text(json.dumps(rows))
    with pytest.raises(DataError, match=r"2 records are invalid: .*row 2: .*; .*row 5: .*--skip-bad") as caught:
        write_shards(path, tmp_path / "out", workers=3)
    assert "missing.png" in str(caught.value)
    written = write_shards(path, tmp_path / "again", skip_bad=True)
    assert (written.samples, written.excluded) == (len(rows) - 2, 2)


def test_an_address_is_downloaded_only_if_a_directory_for_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = source(tmp_path / "raw")
    rows = json.loads(path.read_text())[:1]
    rows[0]["image"] = "https://host/digit.jpg"
    path.write_text(json.dumps(rows))
    with pytest.raises(DataError, match=r"is an address\. Allow downloads with --fetch-urls"):
        write_shards(path, tmp_path / "out")
    monkeypatch.setattr(Downloads, "read", lambda self, address: jpeg(2) if address == rows[0]["image"] else b"")
    assert write_shards(path, tmp_path / "again", fetch_urls=tmp_path / "downloads").samples == 1


def test_an_unknown_format_and_an_empty_source_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="Use one of auto, classes, datasets, imagefolder, llava, messages, parquet"):
        write_shards(tmp_path, tmp_path / "out", format="csv")
    with pytest.raises(DataError, match="the source has no records"):
        write_shards(tmp_path / "empty.jsonl", tmp_path / "out", format="text")


def stop_after(number: int) -> WriteProgress:
    """A progress callback that stops the write as a kill would: no clean-up of complete shards."""

    def progress(done: int, total: int) -> None:
        if done == number:
            raise KeyboardInterrupt

    return progress


def stop(rows: Path, out: Path, after: int, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_shards(rows, out, format="llava", samples_per_shard=2, progress=stop_after(after), **options)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_stopped_write_is_refused_by_the_index_and_continues_after_its_last_whole_shard(tmp_path: Path) -> None:
    rows, out = source(tmp_path / "raw"), tmp_path / "out"
    write_shards(rows, tmp_path / "whole/out", format="llava", samples_per_shard=2)
    stop(rows, out, after=3)
    (out / ".shard-000001.tar.partial").write_bytes(b"left by a kill")
    (out / "shard-000001.tar").write_bytes(b"renamed, and then the kill came before the mark")
    with pytest.raises(DataError, match=r"out/writing: the shards are incomplete, .* Run it again"):
        index_directory(out)
    kept = (out / "shard-000000.tar").stat()
    calls: list[int] = []
    written = write_shards(
        rows, out, format="llava", samples_per_shard=2, progress=lambda done, total: calls.append(done)
    )
    assert written.samples == 5
    assert calls == [3, 4, 5]
    assert (out / "shard-000000.tar").stat() == kept
    assert contents(out) == contents(tmp_path / "whole/out")


@pytest.mark.slow
def test_a_write_killed_again_and_again_ends_with_the_same_bytes(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"text {n}"}) if n % 7 else "{" for n in range(200)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))

    def write(out: Path, progress: WriteProgress | None = None) -> Written:
        rows = tmp_path / "t.jsonl"
        return write_shards(rows, out, format="text", samples_per_shard=3, skip_bad=True, progress=progress)

    def die(done: int, total: int) -> None:
        if len(list(out.glob("*.tar"))) > before + 9 + kills:
            os.kill(os.getpid(), signal.SIGKILL)

    whole, out, kills = write(tmp_path / "whole/out"), tmp_path / "out", 0
    while True:
        before = len(list(out.glob("*.tar")))
        child = os.fork()
        if not child:
            with suppress(BaseException):
                write(out, die)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            break
        kills += 1
    assert kills >= 2
    assert contents(out) == contents(tmp_path / "whole/out")
    assert whole.samples + whole.excluded == 200


def test_a_stopped_write_does_not_continue_with_something_else(tmp_path: Path) -> None:
    rows, out = source(tmp_path / "raw"), tmp_path / "out"
    stop(rows, out, after=3)
    with pytest.raises(DataError, match=r"out/writing: .*options samples_per_shard was 2, got 3.*--fresh"):
        write_shards(rows, out, format="llava", samples_per_shard=3)
    rows.write_text(rows.read_text() + " ")
    with pytest.raises(DataError, match="source bytes was"):
        write_shards(rows, out, format="llava", samples_per_shard=2)
    (out / "shard-000000.tar").unlink()
    assert write_shards(rows, out, format="llava", samples_per_shard=3, fresh=True).samples == 5
    assert sorted(contents(out)) == ["shard-000000.tar", "shard-000001.tar"]


def test_a_shard_that_went_missing_meanwhile_is_named(tmp_path: Path) -> None:
    rows, out = source(tmp_path / "raw"), tmp_path / "out"
    stop(rows, out, after=5)
    (out / "shard-000000.tar").unlink()
    with pytest.raises(DataError, match=r"shard-000000\.tar is missing"):
        write_shards(rows, out, format="llava", samples_per_shard=2)


@pytest.mark.parametrize("workers", [1, 3])
def test_bad_rows_are_left_out_on_request_and_named(tmp_path: Path, workers: int) -> None:
    path = source(tmp_path / "raw", count=9)
    rows = json.loads(path.read_text())
    rows[1]["image"], rows[4], rows[8]["conversations"] = "missing.png", 7, []
    (tmp_path / "raw" / "6.dat").write_bytes(jpeg(6)[:-9])
    path.write_text(json.dumps(rows))
    plain = {"format": "llava", "samples_per_shard": 2, "skip_bad": True}
    assert write_shards(path, tmp_path / "whole/out", **plain) == Written(samples=5, excluded=4)  # type: ignore[arg-type]
    lines = [json.loads(line) for line in (tmp_path / "whole/out/excluded.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == [2, 5, 7, 9]
    assert all(line["file"] == str(path) for line in lines)
    assert ["cannot be read" in lines[0]["reason"], "int" in lines[1]["reason"], "truncated" in lines[2]["reason"]] == [
        True
    ] * 3
    for after in range(1, 9):
        out = tmp_path / str(after) / "out"
        stop(path, out, after, skip_bad=True)
        with open(out / "excluded.jsonl", "a") as file:
            file.write("half a li")
        assert write_shards(path, out, workers=workers, **plain).excluded == 4  # type: ignore[arg-type]
        assert contents(out) == contents(tmp_path / "whole/out")
    assert index_directory(tmp_path / "whole/out")["samples"] == 5
    assert len((tmp_path / "whole/out/excluded.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("workers", [2, 5])
def test_any_number_of_threads_writes_the_same_bytes(tmp_path: Path, workers: int) -> None:
    rows = source(tmp_path / "raw", count=12)
    for number in (1, workers):
        write_shards(rows, tmp_path / str(number) / "out", format="llava", samples_per_shard=5, workers=number)
    assert contents(tmp_path / "1/out") == contents(tmp_path / f"{workers}/out")


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a", "score": NaN}')
    with pytest.raises(DataError, match=r"t\.jsonl row 1: .*not JSON compliant"):
        write_shards(tmp_path / "t.jsonl", tmp_path / "out", format="text")


def test_a_full_disk_is_named_and_leaves_no_half_shard(
    tmp_path: Path, room_for: Callable[[int], AbstractContextManager[None]]
) -> None:
    rows, out = source(tmp_path / "raw"), tmp_path / "out"
    with (
        room_for(4096),
        pytest.raises(
            DataError, match=r"out.*: the shards cannot be written: File too large\. .*the same command resumes"
        ),
    ):
        write_shards(rows, out, format="llava", samples_per_shard=4)
    assert [path.name for path in out.iterdir()] == ["writing"]


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/out: the shards cannot be written: Not a directory"):
        write_shards(source(tmp_path / "raw"), tmp_path / "file/out", format="llava")
    with pytest.raises(DataError, match="the source does not exist"):
        write_shards(tmp_path / "nowhere", tmp_path / "out", format="llava")


def test_starting_over_removes_no_shard_of_another_name(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("writing", "mine.tar", "shard-000000.tar"):
        (out / name).write_bytes(b"")
    with pytest.raises(DataError, match="already holds shards"):
        write_shards(source(tmp_path / "raw"), out, format="llava")
    assert len(list(out.iterdir())) == 3


@pytest.mark.parametrize("change", [{"id": "a\ud800"}, {"split": ["b\udfff"]}])
def test_half_a_character_pair_is_refused_by_row(tmp_path: Path, change: dict[str, object]) -> None:
    path = source(tmp_path / "raw")
    rows = json.loads(path.read_text())
    rows[1] |= change
    path.write_text(json.dumps(rows))
    with pytest.raises(DataError, match=r"rows\.json row 2: .*surrogate"):
        write_shards(path, tmp_path / "out", format="llava")


def mp4() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(6):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 40 * number, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("format", ["llava", "messages", "imagefolder", "parquet", "tsv"])
def test_images_and_videos_of_every_format_are_written_and_indexed(tmp_path: Path, format: str) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "b.jpg").write_bytes(jpeg(1))
    (raw / "v.mp4").write_bytes(mp4())
    turns = [{"from": "human", "value": "<video>or<image>"}, {"from": "gpt", "value": "!"}]
    parts = [{"type": "video"}, {"type": "text", "text": "or"}, {"type": "image"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "!"}]
    path, videos = raw / "rows.jsonl", 1
    if format == "llava":
        path.write_text(json.dumps({"conversations": turns, "image": "b.jpg", "video": "v.mp4"}))
    elif format == "messages":
        path.write_text(json.dumps({"messages": messages, "images": ["b.jpg"], "videos": ["v.mp4"]}))
    elif format == "imagefolder":
        path = raw
        (raw / "captions.jsonl").write_text(json.dumps({"image": "b.jpg", "video": "v.mp4", "text": "both"}))
    elif format == "parquet":
        path = raw / "t.parquet"
        columns = {"image": [{"bytes": jpeg(1), "path": None}], "video": ["v.mp4"], "conversations": [turns]}
        pq.write_table(pa.table(columns), path)
    else:
        path, videos = raw / "t.tsv", 0
        path.write_text(f"index\timage\tquestion\tanswer\n1\t{base64.b64encode(jpeg(1)).decode()}\tq\ta\n")
    assert write_shards(path, tmp_path / "out", format=format).samples == 1
    manifest = index_directory(tmp_path / "out", decode=True)
    assert (manifest["images"], manifest["videos"]) == (1, videos)
    members = open_index(tmp_path / "out").shards[0].members
    found = {(int(m["height"]), int(m["width"]), int(m["frames"]), float(m["fps"])) for m in members[1:]}
    assert found == {(8, 8, 0, 0.0), (48, 64, 6, 4.0)} - ({(48, 64, 6, 4.0)} if not videos else set())
    shard = walk((tmp_path / "out/shard-000000.tar").read_bytes())
    names = [member.name for member in shard if isinstance(member, Member)]
    if format in ("llava", "messages", "parquet"):
        assert names == ["000000000.json", "000000000.0.mp4", "000000000.1.jpg"]


TURNS = st.lists(
    st.fixed_dictionaries(
        {"from": st.sampled_from(["human", "gpt", "bot"]), "value": st.sampled_from(["<image>a", "b", "", "\ud800"])}
    ),
    max_size=3,
)
FIELDS = st.one_of(TURNS, st.sampled_from(["a.jpg", "away.jpg", "x" * 300, "a\0b", ""]), st.integers(), st.none())
ROWS = st.dictionaries(st.sampled_from(["conversations", "image", "id", "boxes", "meta"]), FIELDS)
GOOD = {"conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "!"}], "image": "a.jpg"}


@settings(max_examples=20, deadline=None, derandomize=True)
@given(rows=st.lists(st.one_of(ROWS, st.integers(), st.just(GOOD)), min_size=1, max_size=5), broken=st.booleans())
def test_whatever_rows_hold_those_that_are_written_are_indexed_and_the_others_named(
    rows: list[Any], broken: bool
) -> None:
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root)
        (directory / "a.jpg").write_bytes(jpeg(0))
        lines = [json.dumps(row) for row in (GOOD, *rows)] + ["{"] * broken
        (directory / "rows.jsonl").write_text("\n".join(lines))
        written = write_shards(directory / "rows.jsonl", directory / "out", format="llava", skip_bad=True)
        assert written.samples + written.excluded == len(lines)
        assert index_directory(directory / "out")["samples"] == written.samples >= 1
