# SPDX-License-Identifier: Apache-2.0
"""Encode: whole turns are cut until a sample fits, never through an image; a sample's own limits; videos."""

import io
import json
import random
from dataclasses import replace
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mindvl_data import IGNORE_INDEX, ImageConfig, SampleError, Tokenizer, VideoConfig
from mindvl_data.config import SampleRules
from mindvl_data.encode import decode_sample, encode_sample, placeholder, sample_image
from mindvl_data.patches import PatchBuffer
from mindvl_data.samples import parse_record
from mindvl_data.types import MediaSize, RawSample
from mindvl_data.video import probe

pytestmark = pytest.mark.slow

RULES = SampleRules(
    image=ImageConfig(min_pixels=784, max_pixels=56 * 56), video=VideoConfig(min_pixels=784, max_pixels=4 * 784)
)
IMAGE = {"type": "image"}


def png(height: int, width: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (height % 256, width % 256, 0)).save(file, "PNG")
    return file.getvalue()


def mp4(frames: int) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(frames):
            pixels = np.full((48, 64, 3), 20 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


def raw(turns: list[tuple[str, Any]], *media: tuple[bytes, MediaSize], **more: Any) -> RawSample:
    record = {"messages": [{"role": role, "content": content} for role, content in turns], **more}
    contents, sizes = zip(*media, strict=True) if media else ((), ())
    return RawSample(key="k", record=json.dumps(record).encode(), is_json=True, media=contents, sizes=sizes)


def image(height: int = 56, width: int = 56) -> tuple[bytes, MediaSize]:
    return png(height, width), MediaSize(height, width)


def three_turns() -> RawSample:
    turns = [("system", "Be brief.")]
    for number in range(3):
        turns += [("user", [IMAGE, f"question {number}?"]), ("assistant", f"answer {number}")]
    return raw(turns, image(), image(28, 56), image(28, 28))


def text_of(encoding: Any, tokenizer: Tokenizer) -> str:
    return str(tokenizer.backend.decode(encoding.ids, skip_special_tokens=False))


def test_a_sample_that_fits_stays_whole(tokenizer: Tokenizer) -> None:
    whole = encode_sample(three_turns(), rules=RULES, tokenizer=tokenizer)
    assert whole.grids == ((1, 4, 4), (1, 2, 4), (1, 2, 2))
    assert whole.num_patches == 28
    assert whole.num_tokens == len(whole.ids) - 3 + 7
    limited = replace(RULES, max_tokens=whole.num_tokens)
    assert encode_sample(three_turns(), rules=limited, tokenizer=tokenizer).num_tokens == whole.num_tokens


def test_turns_are_cut_from_the_end_with_their_images_and_the_system_turn_stays(tokenizer: Tokenizer) -> None:
    whole = encode_sample(three_turns(), rules=RULES, tokenizer=tokenizer)
    cut = encode_sample(three_turns(), rules=replace(RULES, max_tokens=whole.num_tokens - 1), tokenizer=tokenizer)
    text = text_of(cut, tokenizer)
    assert "Be brief." in text
    assert "answer 1" in text
    assert "question 2" not in text
    assert cut.grids == whole.grids[:2]
    assert (cut.ids == tokenizer.image_pad_id).sum() == 2
    same = encode_sample(three_turns(), rules=replace(RULES, max_tokens=cut.num_tokens), tokenizer=tokenizer)
    assert same.num_tokens == cut.num_tokens
    again = encode_sample(three_turns(), rules=replace(RULES, max_tokens=cut.num_tokens - 1), tokenizer=tokenizer)
    assert len(again.grids) == 1


def test_images_of_turns_that_were_cut_are_not_decoded(tokenizer: Tokenizer) -> None:
    sample = three_turns()
    sample = replace(sample, media=(*sample.media[:2], b"not an image"))
    whole = encode_sample(sample, rules=RULES, tokenizer=tokenizer)
    buffer = PatchBuffer(100, 588)
    buffer.take(3)
    with pytest.raises(SampleError):
        decode_sample(sample, whole, tokenizer=tokenizer, buffer=buffer)
    assert buffer.used == 3  # the patches of the first two images are removed
    cut = encode_sample(sample, rules=replace(RULES, max_tokens=whole.num_tokens - 1), tokenizer=tokenizer)
    made = decode_sample(sample, cut, tokenizer=tokenizer)
    assert made.image_grid_thw.tolist() == [[1, 4, 4], [1, 2, 4]]
    assert len(made.input_ids) == cut.num_tokens
    assert len(made.pixel_values) == cut.num_patches


def test_the_longest_prefix_of_turns_that_fits_is_kept(tokenizer: Tokenizer) -> None:
    chooser = random.Random(1)
    for _ in range(20):
        turns: list[tuple[str, Any]] = []
        media = []
        for _ in range(chooser.randint(1, 7)):
            content: list[Any] = ["ab " * chooser.randint(1, 30)]
            if chooser.random() < 0.4:
                content.insert(0, IMAGE)
                media.append(image(28 * chooser.randint(1, 2), 56))
            turns += [("user", content), ("assistant", "x" * chooser.randint(1, 40))]
        lengths = []
        for count in range(1, len(turns) // 2 + 1):
            shown = sum(IMAGE in content for role, content in turns[: 2 * count] if role == "user")
            prefix = encode_sample(raw(turns[: 2 * count], *media[:shown]), rules=RULES, tokenizer=tokenizer)
            lengths.append(prefix.num_tokens)
        limit = chooser.randint(lengths[0], lengths[-1] + 5)
        found = encode_sample(raw(turns, *media), rules=replace(RULES, max_tokens=limit), tokenizer=tokenizer)
        assert found.num_tokens == max(length for length in lengths if length <= limit)


def test_where_not_even_one_turn_fits_the_sample_keeps_its_length_and_is_dropped_by_the_plan(
    tokenizer: Tokenizer,
) -> None:
    for sample in (three_turns(), raw([("user", "a " * 50), ("assistant", "b")])):
        whole = encode_sample(sample, rules=RULES, tokenizer=tokenizer)
        limited = encode_sample(sample, rules=replace(RULES, max_tokens=5), tokenizer=tokenizer)
        assert limited.num_tokens == whole.num_tokens > 5


def test_what_is_left_has_an_answer_to_learn(tokenizer: Tokenizer) -> None:
    unanswered = raw([("user", "a"), ("user", "b"), ("assistant", "c"), ("user", "d" * 50), ("assistant", "e")])
    whole = encode_sample(unanswered, rules=RULES, tokenizer=tokenizer)
    cut = encode_sample(unanswered, rules=replace(RULES, max_tokens=whole.num_tokens - 1), tokenizer=tokenizer)
    assert tokenizer.backend.decode(cut.ids[cut.in_loss], skip_special_tokens=False) == "c<|im_end|>"
    late = raw([("user", "a"), ("user", "b" * 50), ("assistant", "c")])
    whole = encode_sample(late, rules=RULES, tokenizer=tokenizer)
    assert encode_sample(late, rules=replace(RULES, max_tokens=20), tokenizer=tokenizer).num_tokens == whole.num_tokens


def test_coordinates_of_an_image_that_was_cut_are_cut_with_it(tokenizer: Tokenizer) -> None:
    box = {"type": "box", "image": 1, "xyxy": [0, 0, 1, 1]}
    turns = [
        ("user", [IMAGE, "a"]), ("assistant", "b"),
        ("user", [IMAGE, "where?"]), ("assistant", [box]), ("user", "x" * 60), ("assistant", "y"),
    ]  # fmt: skip
    sample = raw(turns, image(), image())
    whole = encode_sample(sample, rules=RULES, tokenizer=tokenizer)
    cut = encode_sample(sample, rules=replace(RULES, max_tokens=whole.num_tokens - 1), tokenizer=tokenizer)
    assert len(cut.grids) == 2
    shorter = encode_sample(sample, rules=replace(RULES, max_tokens=cut.num_tokens - 1), tokenizer=tokenizer)
    assert (len(shorter.grids), shorter.sample.has_coordinates) == (1, False)


def test_relative_coordinates_are_thousandths_at_any_size(tokenizer: Tokenizer) -> None:
    """A box of a quarter of the image from its middle; the image is 56 x 112 pixels and the limit 56 x 56."""
    box = {"type": "box", "image": 0, "xyxy": [28, 14, 84, 42]}
    sample = raw([("user", [IMAGE, "where?"]), ("assistant", [box])], image(56, 112))
    rules = replace(RULES, image=replace(RULES.image, coordinates="relative"))
    encoding = encode_sample(sample, rules=rules, tokenizer=tokenizer)
    assert (
        tokenizer.backend.decode(encoding.ids[encoding.in_loss].tolist(), skip_special_tokens=False)
        == "(250,250),(750,750)<|im_end|>"
    )


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, (3136, 12_544)),
        ({"min_pixels": 5000}, (5000, 12_544)),
        ({"max_pixels": 5000}, (3136, 5000)),
        ({"max_pixels": 1000}, (1000, 1000)),  # the source's lower limit gives way
        ({"min_pixels": 20_000}, (20_000, 20_000)),
        ({"min_pixels": 800, "max_pixels": 900}, (800, 900)),
    ],
)
def test_a_samples_own_limits_go_before_those_of_its_source(limits: dict[str, int], expected: tuple[int, int]) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    sample = parse_record({"messages": messages, **limits}, num_images=0)
    image = sample_image(ImageConfig(min_pixels=3136, max_pixels=12_544), sample)
    assert (image.min_pixels, image.max_pixels) == expected


def test_a_samples_own_limits_decide_its_grid_and_its_boxes(tokenizer: Tokenizer) -> None:
    box = {"type": "point", "xy": [112, 56]}
    sample = raw([("user", [IMAGE, "where?"]), ("assistant", [box])], image(112, 112), max_pixels=784)
    encoding = encode_sample(sample, rules=RULES, tokenizer=tokenizer)
    assert encoding.grids == ((1, 2, 2),)
    assert "(28,14)" in text_of(encoding, tokenizer)
    assert decode_sample(sample, encoding, tokenizer=tokenizer).pixel_values.shape == (4, 588)


def test_images_and_videos_of_one_sample(tokenizer: Tokenizer) -> None:
    video = mp4(10)
    turns = [("user", [IMAGE, {"type": "video"}, IMAGE, "what?"]), ("assistant", "this")]
    sample = raw(turns, image(), (video, probe(video)), image(28, 28))
    encoding = encode_sample(sample, rules=RULES, tokenizer=tokenizer)
    assert encoding.grids == ((1, 4, 4), (2, 4, 4), (1, 2, 2))
    made = decode_sample(sample, encoding, tokenizer=tokenizer)
    assert made.image_grid_thw.tolist() == [[1, 4, 4], [1, 2, 2]]
    assert made.video_grid_thw.tolist() == [[2, 4, 4]]
    assert made.pixel_values.shape == (20, 588)
    assert made.pixel_values_videos.shape == (32, 1176)
    assert made.seconds_per_grid.tolist() == [1.0]  # 10 frames at 5 a second are two seconds, four frames of which
    ids = made.input_ids.tolist()
    assert [ids.count(tokenizer.image_pad_id), ids.count(tokenizer.video_pad_id)] == [5, 8]
    assert len(ids) == encoding.num_tokens


def test_an_image_where_the_text_has_a_video_is_a_bad_sample(tokenizer: Tokenizer) -> None:
    turns = [("user", [{"type": "video"}, IMAGE, "?"]), ("assistant", "!")]
    sample = raw(turns, image(), (b"", MediaSize(48, 64, 10, 5.0)))
    with pytest.raises(SampleError, match="mentions a video, but medium 0 is an image"):
        encode_sample(sample, rules=RULES, tokenizer=tokenizer)


def test_an_image_of_another_size_than_the_index_says_is_a_bad_sample(tokenizer: Tokenizer) -> None:
    sample = raw([("user", [IMAGE]), ("assistant", "a")], (png(56, 56), MediaSize(28, 56)))
    encoding = encode_sample(sample, rules=RULES, tokenizer=tokenizer)
    with pytest.raises(SampleError, match="image has 56x56 pixels, but 28x56 were indexed"):
        decode_sample(sample, encoding, tokenizer=tokenizer)


def test_a_placeholder_has_the_indexed_length_and_no_loss_tokens() -> None:
    made = placeholder(7, patch_dim=588, pad_id=3)
    assert made.input_ids.tolist() == [3] * 7
    assert made.labels.tolist() == [IGNORE_INDEX] * 7
    assert made.pixel_values.shape == (0, 588)
    assert made.pixel_values_videos.shape == (0, 1176)
