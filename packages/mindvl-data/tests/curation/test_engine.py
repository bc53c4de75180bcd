# SPDX-License-Identifier: Apache-2.0
"""Tests of mindvl_data.curation.engine: parts, readers, files of parts, and sums."""

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mindvl_data.curation.config import InputConfig, InputFormat
from mindvl_data.curation.engine import parts as parts_module
from mindvl_data.curation.engine.decisions import StoredSignatures, decide, read_decisions
from mindvl_data.curation.engine.part_files import (
    framed,
    frames,
    read_records,
    read_signatures,
    record_frame,
    signature_frame,
    signatures_path,
    to_json,
)
from mindvl_data.curation.engine.part_run import _numbered
from mindvl_data.curation.engine.parts import sample_parts, split_inputs
from mindvl_data.curation.engine.reading import Unreadable, read_part
from mindvl_data.curation.engine.samples import sample_body, sample_frame
from mindvl_data.curation.engine.tally import Examples, add_tally, count_values, new_tally, thumbnail
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Decision, Drop, Step
from mindvl_data.errors import DataError, SampleError


def png(color: str = "red", size: tuple[int, int] = (40, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def read_all(path: Path | str, format: InputFormat, **fields: Any) -> list[Record | Unreadable]:
    config = InputConfig(path=str(path), format=format, **fields)
    found, _ = split_inputs([config])
    return [item for part in found for item in read_part(part, config, seed=0, max_media_bytes=1 << 20)]


def records(path: Path | str, format: InputFormat, **fields: Any) -> list[Record]:
    found = read_all(path, format, **fields)
    assert all(isinstance(item, Record) for item in found), found
    return [item for item in found if isinstance(item, Record)]


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_lines_are_split_by_number_and_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"text": "t" * size}) for size in (1, 1, 1, 300, 1, 1, 1)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))  # without a last line end
    monkeypatch.setattr(parts_module, "LINES_PER_PART", 3)
    monkeypatch.setattr(parts_module, "BYTES_PER_PART", 200)
    monkeypatch.setattr(parts_module, "_BLOCK", 50)

    found, (identity,) = split_inputs([InputConfig(path=str(tmp_path / "a.jsonl"), format="jsonl")])

    assert [(part.first_row, part.records) for part in found] == [(0, 3), (3, 1), (4, 3)]
    assert [part.start for part in found[1:]] == [part.stop for part in found[:-1]]
    assert found[-1].stop == identity.num_bytes
    names = [record.id for record in records(tmp_path / "a.jsonl", "jsonl")]
    assert names == [f"a/a.jsonl:{row}" for row in range(1, 8)]
    assert [record.number for record in records(tmp_path / "a.jsonl", "jsonl")] == [
        0, 1, 2, 1 << 32, 2 << 32, (2 << 32) + 1, (2 << 32) + 2,
    ]  # fmt: skip


def test_json_lines_of_every_kind_are_read_and_other_fields_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    rows = [
        {"text": "plain", "url": "http://x"},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "topic": "t"},
        {"conversations": [{"from": "human", "value": "<image>q"}, {"from": "gpt", "value": "a"}], "image": "a.png"},
        {"image": "a.png", "caption": "red", "url": "http://y"},
        {"image": "a.png", "alt_text": "only an image"},
        {"nothing": 1},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n{broken\n")

    text, chat, llava, caption, image, empty, broken = read_all(tmp_path / "a.jsonl", "jsonl")

    assert isinstance(text, Record)
    assert text.body == {"content": "plain", "url": "http://x"}
    assert isinstance(chat, Record)
    assert chat.body["topic"] == "t"
    assert isinstance(llava, Record)
    assert llava.texts() == ["q", "a"]
    assert llava.media == (png(),)
    assert isinstance(caption, Record)
    assert caption.body == {"content": [{"type": "image"}, "red"], "url": "http://y"}
    assert isinstance(image, Record)
    assert image.body == {"content": [{"type": "image"}], "alt_text": "only an image"}
    assert isinstance(empty, Unreadable)
    assert "expected a conversation" in empty.reason
    assert isinstance(broken, Unreadable)
    assert broken.id == "a/a.jsonl:8"


def test_tar_files_keep_the_metadata_of_img2dataset(tmp_path: Path) -> None:
    metadata = json.dumps({"url": "http://x", "width": 40}).encode()
    write_tar(tmp_path / "a-0.tar", {"k.png": png(), "k.txt": b"a red image", "k.json": metadata})
    write_tar(tmp_path / "a-1.tar", {"l.json": b'{"caption": "blue", "meta": {"topic": "t"}}', "l.png": png("blue")})

    first, second = records(str(tmp_path / "a-{0..1}.tar"), "webdataset", name="web")

    assert first.id == "web/a-0.tar:k"
    assert first.body == {"id": "k", "content": [{"type": "image"}, "a red image"], "url": "http://x", "width": 40}
    assert second.body == {"id": "l", "content": [{"type": "image"}, "blue"], "topic": "t"}
    assert (first.number, second.number) == (0, 1 << 32)
    assert [record.id for record in records(tmp_path, "shards", name="s")] == ["s/a-0.tar:k", "s/a-1.tar:l"]


def test_the_rest_of_a_damaged_shard_is_unreadable_and_what_was_read_is_kept(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"k.txt": b"one", "l.txt": b"two", "m.txt": b"three"})
    content = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(content[: 3 * 1024 - 600])

    *good, last = read_all(tmp_path / "a.tar", "webdataset")

    assert [record.body["content"] for record in good if isinstance(record, Record)] == ["one"]
    assert isinstance(last, Unreadable)
    assert last.ends_part


def test_row_groups_of_parquet_are_parts(tmp_path: Path) -> None:
    table = pa.table({"image": [png(), png("blue")], "caption": ["red", "blue"], "url": ["u", "v"]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1)

    first, second = records(tmp_path, "parquet")

    assert first.body == {"content": [{"type": "image"}, "red"], "url": "u"}
    assert second.id == f"{tmp_path.name}/a.parquet:row 2"
    assert second.media == (png("blue"),)
    assert second.number == 1 << 32


def test_pdfs_of_a_directory_or_a_list_are_documents(tmp_path: Path) -> None:
    for name in ("b.pdf", "a.pdf"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "large.pdf").write_bytes(bytes((1 << 20) + 1))
    (tmp_path / "list.txt").write_text("b.pdf\n\n")

    first, second, large = read_all(tmp_path, "pdf", name="scans")

    assert isinstance(first, Record)
    assert isinstance(second, Record)
    assert (first.id, second.id) == ("scans/a.pdf", "scans/b.pdf")
    assert first.media == (b"a.pdf",)
    assert isinstance(large, Unreadable)
    assert large.reason.startswith("an image or document has 1,048,577 bytes, more than limits.media_mib allows")
    assert [record.media for record in records(tmp_path / "list.txt", "pdf")] == [(b"b.pdf",)]


@pytest.mark.parametrize("format", ["shards", "webdataset", "parquet", "jsonl", "imagefolder", "pdf"])
def test_a_missing_input_is_refused_by_name(tmp_path: Path, format: InputFormat) -> None:
    with pytest.raises(DataError, match="missing"):
        split_inputs([InputConfig(path=str(tmp_path / "missing"), format=format)])


def test_a_sample_takes_the_same_number_of_records_from_every_input(tmp_path: Path) -> None:
    for name, count in (("large", 500), ("small", 50)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{i}"}) + "\n" for i in range(count)))
    inputs = [InputConfig(path=str(tmp_path / f"{name}.jsonl"), format="jsonl") for name in ("large", "small")]
    found, _ = split_inputs(inputs)

    chosen = sample_parts(found, 11, seed=3)

    assert [part.take for part in chosen] == [5, 6]
    read = [[item.number for item in read_part(part, inputs[part.input], seed=3, max_media_bytes=1)] for part in chosen]
    assert [len(numbers) for numbers in read] == [5, 6]
    assert all(numbers == sorted(numbers) for numbers in read)
    assert read[0] != [0, 1, 2, 3, 4]
    assert sample_parts(found, 11, seed=3) == chosen


def test_records_survive_their_file(tmp_path: Path) -> None:
    record = Record(
        number=7 << 32 | 5, piece=2, id="a", body={"content": ["\ud800", "\u4e2d"]}, media=(b"", b"xy"),
        facts={"ratio": 0.1, "tags": ["a"], "score": np.float32(0.5)},
    )  # fmt: skip
    (tmp_path / "file").write_bytes(record_frame(record) + record_frame(record))

    first, second = read_records(tmp_path / "file")

    assert first == second == record
    assert list(frames(tmp_path / "file", skip=2)) == []


def test_signatures_survive_their_file_and_are_streamed_in_order(tmp_path: Path) -> None:
    for part, rows in ((0, 2), (1, 3)):
        block = np.full((rows, 4), part, np.uint8)
        signatures_path(tmp_path, part).write_bytes(signature_frame([part << 32] * rows, list(range(rows)), block))

    stored = StoredSignatures(tmp_path, [1, 0])

    assert (stored.num_rows, stored.width) == (5, 4)
    assert [numbers.tolist() for numbers, _, _ in stored.blocks()] == [[0, 0], [1 << 32] * 3]
    _, pieces, signatures = next(read_signatures(signatures_path(tmp_path, 1)))
    assert pieces.tolist() == [0, 1, 2]
    assert signatures.tolist() == [[1] * 4] * 3


def test_decisions_are_kept_by_part(tmp_path: Path) -> None:
    signatures_path(tmp_path, 0).write_bytes(signature_frame([0], [0], np.zeros((1, 8), np.uint8)))
    drop = Drop("duplicate", "same as x", {"duplicate_group": "0:0"})
    decisions = [Decision(2 << 32, 1, drop), Decision(3, 0, facts={"cluster": 4})]
    step = Step(
        name="x", config=int, summary="", section="", sign=lambda *_: [], decide=lambda *_: iter(decisions)
    )  # fmt: skip

    shown = decide(step, None, Context(seed=0, cache=tmp_path), tmp_path, [0], tmp_path / "decisions")

    assert shown == {"0:0"}
    assert read_decisions(tmp_path / "decisions", 0) == {(3, 0): decisions[1]}
    assert read_decisions(tmp_path / "decisions", 2) == {(2 << 32, 1): decisions[0]}
    assert read_decisions(tmp_path / "decisions", 1) == {}


def test_sums_do_not_depend_on_the_order_of_the_parts() -> None:
    tallies = []
    for part in range(3):
        tally = new_tally(1)
        tally["read"] = part
        values: list[Any] = [0.5 * part, 1000.3, part, True, "text"]
        count_values(tally["steps"][0]["facts"], "fact", values)
        tally["examples"] = {"0 short": [{"rank": rank} for rank in (part, part + 3)]}
        tallies.append(tally)
    forward, backward = new_tally(1), new_tally(1)
    for total, order in ((forward, tallies), (backward, tallies[::-1])):
        for tally in order:
            add_tally(total, tally)

    assert forward == backward
    fact = forward["steps"][0]["facts"]["fact"]
    # 1000.3 has ten bits before the point; seven are kept.
    assert fact["numbers"] == {"0.0": 2, "0.5": 1, "1.0": 2, "2.0": 1, "1000.0": 3}
    assert fact["categories"] == {"True": 3, "text": 3}
    assert [example["rank"] for example in forward["examples"]["0 short"]] == [0, 1, 2, 3]


def test_numbers_that_no_histogram_can_show_are_left_out() -> None:
    facts: dict[str, Any] = {}
    count_values(facts, "area", [10**400, -(10**400), float("nan"), float("inf"), 3])
    assert facts["area"]["numbers"] == {"3.0": 1}


def test_a_fact_with_many_strings_is_not_listed() -> None:
    facts: dict[str, Any] = {}
    count_values(facts, "id", [str(number) for number in range(101)])
    assert facts["id"]["has_more"]
    assert facts["id"]["categories"] == {}


def test_examples_do_not_depend_on_the_order() -> None:
    some = [Record(number=number, id=str(number), body={"content": "x" * 300}) for number in range(50)]
    chosen = []
    for order in (some, some[::-1]):
        examples = Examples(seed=1)
        for record in order:
            examples.offer("0 short", record, "step", Drop("short", 3, {"length": 3}))
        chosen.append([example for _, _, example in examples.chosen()])

    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 4
    assert chosen[0][0]["facts"] == {"length": 3}
    assert len(chosen[0][0]["text"]) == 280


def test_a_thumbnail_is_small_and_a_damaged_image_has_none() -> None:
    assert thumbnail(Record(number=0, id="a", body={}, media=(png(size=(2000, 1000)),))) is not None
    assert thumbnail(Record(number=0, id="a", body={}, media=(b"no image",))) is None
    assert thumbnail(Record(number=0, id="a", body={})) is None


def test_fields_of_the_source_and_facts_go_to_meta() -> None:
    body = {"content": "t", "url": "u", "source": "old", "curation": {"old": 1}, "min_pixels": 784}
    record = Record(number=0, id="in:3", body=body, facts={"new": np.float64(0.5)})

    assert sample_body(record, "name") == {
        "source": "name", "id": "in:3", "content": "t", "min_pixels": 784,
        "meta": {"url": "u", "origin": "in:3", "curation": {"old": 1, "new": 0.5}},
    }  # fmt: skip
    (header, media) = framed_parts(sample_frame(record, "name"))
    assert json.loads(header)["meta"]["url"] == "u"
    assert media == ()


def framed_parts(content: bytes) -> tuple[bytes, tuple[bytes, ...]]:
    length = int.from_bytes(content[:4], "little")
    assert content == framed(content[8 : 8 + length], ())
    return content[8 : 8 + length], ()


def test_an_invalid_sample_is_refused() -> None:
    with pytest.raises(SampleError, match="is not an image"):
        sample_frame(Record(number=0, id="a", body={"content": [{"type": "image"}, "t"]}, media=(b"%PDF",)), "x")
    with pytest.raises(SampleError, match="has no text to train on"):
        sample_frame(Record(number=0, id="a", body={"content": []}), "x")


def test_a_pipe_among_images_is_unreadable_and_the_others_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(png())
    (tmp_path / "c.png").symlink_to("nowhere.png")

    first, second, third = read_all(tmp_path, "imagefolder")

    assert isinstance(first, Unreadable)
    assert first.reason == "a.png is not a regular file"
    assert isinstance(second, Record)
    assert isinstance(third, Unreadable)


def test_an_address_may_be_longer_than_the_name_of_a_file() -> None:
    address = "pipe:cat " + "x" * 300 + ".tar"
    config = InputConfig(path=address, format="webdataset", allow_pipe=True)
    (part,), (identity,) = split_inputs([config])
    assert (part.files, identity.num_bytes) == ((address,), 0)


def test_text_that_is_not_unicode_is_stored_as_utf8() -> None:
    assert to_json("caf\udce9 \u4e2d") == b'"caf\\udce9 \xe4\xb8\xad"'
    assert json.loads(to_json("caf\udce9")) == "caf\udce9"


def test_pieces_are_numbered_again_only_where_a_step_made_several_records() -> None:
    """Otherwise the pieces of a record, and what is random about them, would depend on the others in its batch."""
    given = [Record(number=number, piece=piece, id="", body={}) for number, piece in ((1, 2), (1, 4), (2, 1), (2, 1))]
    found = [(record.number, record.piece) for record in _numbered(given, {2})]
    assert found == [(1, 2), (1, 4), (2, 0), (2, 1)]
