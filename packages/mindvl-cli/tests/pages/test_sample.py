# SPDX-License-Identifier: Apache-2.0
"""The pages of `data show`: every stage on one page that holds everything itself, well-formed and escaped."""

import io
import json
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindvl_cli.pages import sample as pages
from mindvl_cli.pages.sample import pack_page, sample_page
from mindvl_data import DataConfig, ImageConfig, Loader, PackingConfig, SourceConfig, index_directory, load_tokenizer
from mindvl_data.config import SampleRules
from mindvl_data.preview import Preview, preview_sample
from mindvl_data.preview_media import Medium
from mindvl_data.types import MediaSize


@pytest.fixture
def shown(tmp_path: Path, tiny_place: Path) -> Preview:
    """A sample with an image, a box and text that looks like markup."""
    file = io.BytesIO()
    Image.fromarray(np.full((150, 220, 3), (120, 160, 200), np.uint8)).save(file, "PNG")
    box = {"type": "box", "image": 0, "xyxy": [120, 90, 200, 140]}
    record = {
        "messages": [
            {"role": "user", "content": [{"type": "image"}, "Where is the <red> car?"]},
            {"role": "assistant", "content": ["It is at ", box, "."]},
        ]
    }
    with tarfile.open(tmp_path / "shard-000000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in (("k.json", json.dumps(record).encode()), ("k.0.png", file.getvalue())):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    index_directory(tmp_path)
    tokenizer = load_tokenizer(tiny_place / "tokenizer")
    return preview_sample(tmp_path, tokenizer=tokenizer, rules=SampleRules(image=ImageConfig()))


def check(page: str) -> ElementTree.Element:
    """The body, if it is well-formed but for the tags that HTML leaves open, and nothing is fetched."""
    assert "<script" not in page
    assert "http" not in page
    body = page.partition("<body>")[2].partition("</body>")[0].strip().replace("<br>", "")
    for tag in ("img", "input"):
        pieces = body.split(f"<{tag} ")
        body = pieces[0] + "".join(f"<{tag} {piece.replace('>', '/>', 1)}" for piece in pieces[1:])
    return ElementTree.fromstring(body.replace(" checked/>", "/>"))


def test_a_page_shows_every_stage_of_a_sample_with_an_image_and_its_box(shown: Preview) -> None:
    page = sample_page(shown)
    root = check(page)
    titles = [heading.text or "" for heading in root.iter("h2")]
    assert [title.rpartition("(")[2] for title in titles] == ["raw)", "sample)", "tokens)", "pack)"]
    text = " ".join(root.itertext())
    assert "(122,84),(204,131) of image 0" in text
    assert "8 x 5 = 40 visual tokens" in text
    (mark,) = (node.attrib for node in root.iter("rect"))
    assert [mark[name] for name in ("x", "y", "width", "height")] == ["122", "84", "82", "47"]
    grid, again = (node.attrib["d"] for node in root.iter("path"))  # dark, and light dashes on it
    assert again == grid
    assert grid.split("M")[1:3] == ["28 0V140", "56 0V140"]
    assert grid.endswith("M0 112H224")
    assert page.count("data:image/png;base64,") == 1
    assert "&lt;red&gt;" in page
    assert "<red>" not in page
    assert "<|im_end|>" not in page
    assert "&lt;|im_end|&gt;" in page


def test_a_sample_that_is_too_long_says_so_and_one_without_a_tokenizer_has_two_stages(shown: Preview) -> None:
    object.__setattr__(shown.rules, "max_tokens", 10)
    assert "It does not fit a packed sequence of 10 tokens." in sample_page(shown)
    object.__setattr__(shown, "encoding", None)
    assert len(list(check(sample_page(shown)).iter("h2"))) == 2


def test_videos_are_strips_of_frames_and_broken_media_are_named(
    shown: Preview, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = tuple((second / 2, np.zeros((110, 146, 3), np.uint8)) for second in range(4))
    size = MediaSize(height=120, width=160, frames=20, fps=5.0)
    video = Medium(number=1, size=size, height=112, width=140, grid=(4, 4, 5), num_frames=8, frames=frames)
    broken = Medium(number=2, size=size, error="image cannot be decoded <x>")
    monkeypatch.setattr(pages, "media", lambda preview: [video, broken])
    page = sample_page(shown)
    text = " ".join(" ".join(check(page).itertext()).split())
    assert "video 1: 8 of 20 frames, 4 of them shown; each resized to 140 x 112; 4 x 4 x 5 = 80 visual tokens" in text
    assert "1.50 s" in text
    assert "medium 2: image cannot be decoded <x>" in text
    assert page.count("data:image/jpeg;base64,") == 4


def test_a_packed_sequence_is_shown_with_its_samples(tiny_place: Path) -> None:
    config = DataConfig(
        sources=(SourceConfig(name="text", path=tiny_place / "shards" / "text"),),
        tokenizer=tiny_place / "tokenizer",
        packing=PackingConfig(seq_length=128),
    )
    with Loader(config, global_batch_size=1, position_kind="rope") as loader:
        batch = next(loader)
    page = pack_page(batch, load_tokenizer(tiny_place / "tokenizer"))
    check(page)
    assert all(segment.key in page for segment in batch.samples)
