# SPDX-License-Identifier: Apache-2.0
"""Turns and media of a preview: sizes, boxes, frames, cut turns, media that do not decode, packed samples."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mindvl_data import DataConfig, ImageConfig, Loader, Tokenizer, VideoConfig, index_directory
from mindvl_data.config import SampleRules
from mindvl_data.preview import preview_sample
from mindvl_data.preview_media import media, packed_samples, turns

RULES = SampleRules(image=ImageConfig(), video=VideoConfig(min_pixels=784, max_pixels=16 * 784))


def film() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 160, 120, "yuv420p"
        for number in range(20):
            pixels = np.zeros((120, 160, 3), np.uint8)
            pixels[40:80, 6 * number : 6 * number + 40] = (240, 200, 60)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """One sample with an image, a box, a video, a tool turn and three questions."""
    file = io.BytesIO()
    canvas = np.full((150, 220, 3), (120, 160, 200), np.uint8)
    canvas[90:140, 120:200] = (200, 60, 50)
    Image.fromarray(canvas).save(file, "PNG")
    image, video = {"type": "image"}, {"type": "video"}
    box = {"type": "box", "image": 0, "xyxy": [120, 90, 200, 140]}
    turns: list[tuple[str, Any]] = [
        ("system", "Say where things are."),
        ("user", [image, "Where is the <red> car?"]), ("assistant", ["It is at ", box, "."]),
        ("tool", "the car is parked"), ("assistant", "It stands still."),
        ("user", [video, "And here?"]), ("assistant", "It moves to the right."),
        ("user", "Why? " * 40), ("assistant", "It is unknown."),
    ]  # fmt: skip
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    with tarfile.open(tmp_path / "shard-000000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        members = (("k.json", json.dumps(record).encode()), ("k.0.png", file.getvalue()), ("k.1.mp4", film()))
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    index_directory(tmp_path)
    return tmp_path


def test_an_image_with_its_box_and_a_video(mixed: Path, tokenizer: Tokenizer) -> None:
    shown = preview_sample(mixed, tokenizer=tokenizer, rules=RULES)
    image, video = media(shown)
    assert (image.height, image.width, image.grid) == (140, 224, (1, 5, 8))
    assert [pixels.shape for _, pixels in image.frames] == [(140, 224, 3)]
    # 220 x 150 becomes 224 x 140: 120 * 224 / 220 = 122.2, 90 * 140 / 150 = 84
    assert image.marks == ((122, 84, 204, 131),)
    assert [kind for kind, _ in turns(shown)[2].parts] == ["text", "box", "text"]
    assert turns(shown)[2].parts[1][1] == "(122,84),(204,131) of image 0"
    assert turns(shown)[1].parts == (("medium", "image 0"), ("text", "Where is the <red> car?"))
    assert (video.size.frames, video.num_frames, len(video.frames)) == (20, 8, 8)  # two a second of four seconds
    assert [pixels.shape for _, pixels in video.frames] == [(110, 146, 3)] * 8
    moments = [moment for moment, _ in video.frames]
    assert moments == sorted(moments)
    assert moments[-1] < 4


def test_turns_that_are_cut_are_marked_and_their_media_are_left_out(mixed: Path, tokenizer: Tokenizer) -> None:
    whole = preview_sample(mixed, tokenizer=tokenizer, rules=RULES)
    assert whole.encoding is not None
    assert not any(turn.is_cut for turn in turns(whole))
    for max_tokens, num_cut, num_media in ((whole.encoding.num_tokens - 1, 2, 2), (200, 4, 1)):
        rules = SampleRules(image=RULES.image, video=RULES.video, max_tokens=max_tokens)
        shown = preview_sample(mixed, tokenizer=tokenizer, rules=rules)
        assert [turn.is_cut for turn in turns(shown)] == [False] * (9 - num_cut) + [True] * num_cut
        assert len(media(shown)) == num_media


def test_a_medium_that_does_not_decode_has_an_error(mixed: Path) -> None:
    shown = preview_sample(mixed, rules=RULES)
    object.__setattr__(shown.raw, "media", (shown.raw.media[0][:150], shown.raw.media[1]))
    broken, video = media(shown)
    assert broken.error.startswith("image cannot be decoded")
    assert not broken.frames
    assert video.num_frames == 8


def test_text_without_a_template_is_one_turn_without_a_role(shard_directories: dict[str, Path]) -> None:
    (turn,) = turns(preview_sample(shard_directories["text"]))
    assert turn.role == ""
    assert turn.parts[0][0] == "text"


def test_a_packed_sequence_is_the_tokens_of_its_samples(
    make_config: Callable[..., DataConfig], tokenizer: Tokenizer
) -> None:
    with Loader(make_config(), global_batch_size=1, position_kind="rope") as loader:
        batch = next(loader)
    samples = packed_samples(batch, tokenizer)
    assert [sample.key for sample in samples] == [segment.key for segment in batch.samples]
    assert [sample.start for sample in samples] == batch.cu_seqlens.tolist()[: len(samples)]
    assert all(sum(run.count for run in sample.tokens) == sample.stop - sample.start for sample in samples)
