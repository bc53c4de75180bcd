# SPDX-License-Identifier: Apache-2.0
"""Preview pages: every stage on one page that holds everything itself; images, boxes, videos, cut turns."""

import io
import json
import tarfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mindvl_data import DataConfig, ImageConfig, Loader, Tokenizer, VideoConfig, index_directory
from mindvl_data.config import SampleRules
from mindvl_data.preview import preview_sample
from mindvl_data.preview_page import pack_page, sample_page

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
        ("user", "Why? " * 40), ("assistant", "Nobody knows."),
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


class Balance(HTMLParser):
    """Collects tags that were opened and never closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "img", "input", "td", "th"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_html(page: str) -> None:
    parser = Balance()
    parser.feed(page.replace("/>", ">").replace("<image", "<img").replace("<path", "<img").replace("<rect", "<img"))
    assert parser.open == []
    assert "<script" not in page
    assert "http" not in page


def test_a_page_with_a_image_its_box_and_a_video(mixed: Path, tokenizer: Tokenizer) -> None:
    shown = preview_sample(mixed, tokenizer=tokenizer, rules=RULES)
    page = sample_page(shown)
    check_html(page)
    assert [f"<b>{stage}</b>" in page for stage in ("raw", "sample", "tokens", "pack")] == [True] * 4
    # 220 x 150 becomes 224 x 140: 120 * 224 / 220 = 122.2, 90 * 140 / 150 = 84
    assert "(122,84),(204,131)" in page
    assert '<rect class=mark x="122" y="84" width="82" height="47"/>' in page
    assert "8 x 5 = 40 visual tokens" in page
    assert page.count("data:image/png;base64,") == 1
    assert page.count("data:image/jpeg;base64,") == 8  # two frames a second of four seconds
    assert "8 of 20 frames" in page
    assert "&lt;red&gt;" in page
    assert "<red>" not in page


def test_turns_that_were_cut_are_marked_and_their_media_are_not_shown(mixed: Path, tokenizer: Tokenizer) -> None:
    whole = preview_sample(mixed, tokenizer=tokenizer, rules=RULES)
    assert whole.encoding is not None
    rules = SampleRules(image=RULES.image, video=RULES.video, max_tokens=whole.encoding.num_tokens - 1)
    page = sample_page(preview_sample(mixed, tokenizer=tokenizer, rules=rules))
    check_html(page)
    assert page.count("cut: the sample is too long") == 2
    assert page.count("data:image/jpeg;base64,") == 8
    rules = SampleRules(image=RULES.image, video=RULES.video, max_tokens=200)
    page = sample_page(preview_sample(mixed, tokenizer=tokenizer, rules=rules))
    assert page.count("cut: the sample is too long") == 4
    assert page.count("data:image/jpeg;base64,") == 0


def test_a_medium_that_cannot_be_decoded_is_named_on_the_page(mixed: Path) -> None:
    shown = preview_sample(mixed, rules=RULES)
    object.__setattr__(shown.raw, "media", (shown.raw.media[0][:150], shown.raw.media[1]))
    page = sample_page(shown)
    check_html(page)
    assert "class=bad>medium 0: image cannot be decoded" in page


def test_text_on_the_page_is_escaped(shard_directories: dict[str, Path], tokenizer: Tokenizer) -> None:
    page = sample_page(preview_sample(shard_directories["text"], tokenizer=tokenizer))
    check_html(page)
    assert "<|im_end|>" not in page
    assert "&lt;|im_end|&gt;" in page


def test_a_pack_is_shown_with_its_segments(make_config: Callable[..., DataConfig], tokenizer: Tokenizer) -> None:
    with Loader(make_config(), global_batch_size=1, position_kind="rope") as loader:
        batch = next(loader)
    page = pack_page(batch, tokenizer)
    check_html(page)
    assert all(segment.key in page for segment in batch.segments)
