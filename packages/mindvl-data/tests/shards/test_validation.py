# SPDX-License-Identifier: Apache-2.0
"""What a shard may hold, what is refused by name, and what is left out on request."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mindvl_data import DataError
from mindvl_data.shards.index_format import hash_key
from mindvl_data.shards.tar import ShardWriter
from mindvl_data.shards.validation import Rules, ValidShard, validate_shard

CHAT = json.dumps({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}).encode()


def asked(num_images: int) -> bytes:
    shown = [{"type": "image"}] * num_images
    return json.dumps(
        {"messages": [{"role": "user", "content": shown}, {"role": "assistant", "content": "!"}]}
    ).encode()


def png(height: int = 30, width: int = 40) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def shard(tmp_path: Path, *members: tuple[str, bytes]) -> Path:
    with ShardWriter(tmp_path / "s.tar") as writer:
        for member, content in members:
            writer.add(member, content)
    return tmp_path / "s.tar"


def validate(path: Path, **changes: Any) -> ValidShard:
    return validate_shard(path, Rules(**({"decode_limit": 10**8, "exclude_bad": False, "decode": False} | changes)))


def keys(found: ValidShard) -> list[int]:
    return [int(key) for key in found.samples["key_hash"]]


@pytest.mark.parametrize(
    ("members", "num_members"),
    [
        ([("x.jpg", png()), ("x.txt", b"a cat"), ("y.txt", b"no image")], [2, 1]),
        ([("x.PNG", png()), ("x.caption", b"a cat")], [2]),
        ([("x.image.png", png()), ("x.json", b'{"caption": "a cat", "url": "u"}')], [2]),
        ([("x.jpg", png()), ("x.txt", b"a cat"), ("x.json", b'{"url": "u", "caption": "a cat"}')], [2]),
        ([("a/b.c/x.jpg", png()), ("a/b.c/x.json", b'[{"from": "gpt", "value": "<image>x"}]')], None),
        ([("d/x.jpg", png()), ("d/x.json", b'{"question": "?", "answers": ["!"]}'), ("e/x.txt", b"c")], [2, 1]),
        ([("x.1.png", png(20)), ("x.json", asked(2)), ("x.0.png", png())], [3]),
    ],
)
def test_shards_of_others_are_read_as_they_are(
    tmp_path: Path, members: list[tuple[str, bytes]], num_members: list[int] | None
) -> None:
    path = shard(tmp_path, *members)
    if num_members is None:
        with pytest.raises(DataError, match="assistant contains an image"):
            validate(path)
    else:
        assert validate(path).samples["num_members"].tolist() == num_members


def test_images_stand_in_the_order_of_their_numbers_behind_the_record(tmp_path: Path) -> None:
    found = validate(shard(tmp_path, ("x.1.png", png(20)), ("x.json", asked(2)), ("x.0.png", png(10, 50))))
    assert found.members["height"].tolist() == [0, 10, 20]
    assert int(found.samples["offset"][0]) == 512


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.json", b"{broken")], "record cannot be read"),
        ([("a.json", b'{"messages": []}')], "at least one message"),
        ([("a.json", b'{"messages": [{"role": "bot", "content": "x"}]}')], "role must be one of"),
        ([("a.json", CHAT.replace(b"!", b""))], "assistant is empty"),
        ([("a.json", CHAT.replace(b"!", b"\\ud800"))], "lone surrogate"),
        ([("a.json", b'{"url": "x"}')], "either `messages` or `content`"),
        ([("a.txt", b"x" * 10_000_000)], "10000000"),
        ([("a.pkl", b"x"), ("a.txt", b"x")], "'a.pkl' must be one of"),
        ([("a.json", CHAT), ("a.1.png", b"x")], "numbered"),
        ([("a.txt", b"a cat"), ("a.0.png", b"x")], "'a.0.png': the format of a file of 1 bytes is not"),
        ([("a.txt", b"a cat"), ("a.0.png", png()[:-9])], "truncated"),
        ([("a.txt", b"a cat"), ("a.x.png", png()), ("a.y.png", png())], "KEY.NUMBER.EXTENSION"),
        ([("a.json", CHAT), ("a.txt", b"x")], "got 2"),
        ([("a.json", CHAT), ("a.0.png", png())], "mentions 0 images, but the sample has 1"),
        ([("a.0.png", png())], "got 0"),
        ([("a.txt", b"\xff\xfe")], "record cannot be read"),
        ([("a.json", b"[" * 100_000)], "record cannot be read"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name_or_left_out(
    tmp_path: Path, members: list[tuple[str, bytes]], message: str
) -> None:
    path = shard(tmp_path, *members, ("z.txt", b"sound"))
    with pytest.raises(DataError, match=message) as caught:
        validate(path)
    assert "sample 'a'" in str(caught.value)
    assert "s.tar at byte 0" in str(caught.value)
    found = validate(path, exclude_bad=True)
    assert keys(found) == [hash_key("z")]
    (line,) = found.excluded
    assert (line["shard"], line["key"], line["offset"]) == ("s.tar", "a", 0)
    assert message.strip("'") in line["reason"].replace("'", "") or message in line["reason"]


def test_a_key_that_comes_again_is_left_out_and_scattered_parts_belong_to_no_one(tmp_path: Path) -> None:
    path = shard(tmp_path, ("a.txt", b"1"), ("b.txt", b"2"), ("a.txt", b"3"))
    with pytest.raises(DataError, match=r"at byte 2048: .*duplicate key 'a', already at byte 0"):
        validate(path)
    assert keys(validate(path, exclude_bad=True)) == [hash_key("a"), hash_key("b")]
    path = shard(tmp_path, ("a.txt", b"1"), ("b.txt", b"2"), ("a.png", png()), ("c.txt", b"3"), ("b.png", png()))
    with pytest.raises(DataError, match="'a': its members are in 2 separate parts"):
        validate(path)
    assert keys(validate(path, exclude_bad=True)) == [hash_key("c")]


def test_a_caption_beside_damage_may_have_lost_its_image_and_a_conversation_says_so(tmp_path: Path) -> None:
    members = [("a.json", asked(1)), ("a.0.png", png()), ("b.txt", b"b"), ("b.png", png()), ("c.json", CHAT)]
    path = shard(tmp_path, *members)
    sound = path.read_bytes()

    def left(name: str) -> list[int]:
        content = bytearray(sound)
        content[content.index(name.encode() + b"\0")] ^= 1
        path.write_bytes(content)
        with pytest.raises(DataError, match="checksum is wrong"):
            validate(path)
        return keys(validate(path, exclude_bad=True))

    assert left("a.json") == [hash_key("b"), hash_key("c")]
    assert left("c.json") == [hash_key("a")]  # b.png is the last thing before the damage: there may have been another
    assert left("b.png") == [hash_key("a"), hash_key("c")]


def test_an_empty_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no samples"):
        validate(shard(tmp_path))
    assert validate(shard(tmp_path), exclude_bad=True).excluded[0]["reason"] == "shard has no samples"
    (tmp_path / "s.tar").write_bytes(b"")
    with pytest.raises(DataError, match="truncated"):
        validate(tmp_path / "s.tar")


@pytest.mark.parametrize("kind", ['["image"]', '{"a": 1}', "null", "3", '[["image"]]'])
def test_a_part_whose_type_is_no_text_is_one_bad_sample_and_no_end(tmp_path: Path, kind: str) -> None:
    record = json.loads(asked(1))
    record["messages"][0]["content"].append({"type": json.loads(kind)})
    members = [("x.json", json.dumps(record).encode()), ("x.0.png", png()), ("y.json", CHAT)]
    with pytest.raises(DataError, match=r"sample 'x': part type must be text, image, video, box or point, got "):
        validate(shard(tmp_path, *members))
    found = validate(shard(tmp_path, *members), exclude_bad=True)
    assert keys(found) == [hash_key("y")]
    assert [line["key"] for line in found.excluded] == ["x"]


def test_a_huge_record_beside_media_and_text_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = b"[" + b"0," * 9_000_000 + b"0]"
    path = shard(tmp_path, ("x.png", png()), ("x.txt", b"a cat"), ("x.json", huge), ("y.txt", b"a dog"))

    def refuse(text: bytes) -> None:
        raise AssertionError(f"{len(text)} bytes are parsed")

    monkeypatch.setattr("mindvl_data.shards.validation.json.loads", refuse)
    with pytest.raises(DataError, match="record has 18000003 bytes, more than the limit of 8000000"):
        validate(path)
    assert len(validate(path, exclude_bad=True).samples) == 1
