# SPDX-License-Identifier: Apache-2.0
"""Lengths: what is planned is what comes out, whatever the pixel budget; measured once."""

import hashlib
import json
import random
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindvl_data import (
    DataConfig,
    ImageConfig,
    Loader,
    PackingConfig,
    SampleError,
    SourceConfig,
    Tokenizer,
    VideoConfig,
    index_directory,
    write_shards,
)
from mindvl_data import measure as measure_module
from mindvl_data.config import SampleRules
from mindvl_data.encode import encode_sample
from mindvl_data.measure import _patches, measure_directory, sample_lengths, shard_lengths
from mindvl_data.order.sources import SourceIndex
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import ShardIndex, open_index
from mindvl_data.shards.index_format import MEMBER_DTYPE, SAMPLE_DTYPE
from mindvl_data.types import MediaSize, RawSample

SMALL = SampleRules(image=ImageConfig(max_pixels=5000))


@pytest.fixture
def boxes(tmp_path: Path) -> Path:
    """Boxes whose numbers have more or fewer digits in the resized image."""
    rows = []
    for number, (height, width) in enumerate([(40, 60), (700, 500), (300, 1200), (1000, 1000)]):
        Image.new("RGB", (width, height)).save(tmp_path / f"{number}.png")
        turns = [
            {"from": "human", "value": "<image>Where? Near <point:0>"},
            {"from": "gpt", "value": "<box:0> and <box:1>"},
        ]
        boxes = [[0, 0, width, height], {"image": 0, "xyxy": [width / 3, 1, width / 2, height - 1]}]
        row = {"image": f"{number}.png", "conversations": turns, "boxes": boxes, "points": [[width / 2, height / 2]]}
        rows.append(row)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    write_shards(tmp_path / "rows.json", tmp_path / "shards", format="llava")
    index_directory(tmp_path / "shards")
    return tmp_path / "shards"


@pytest.mark.parametrize(("low", "high"), [(784, 784), (784, 9 * 784), (3136, 1280 * 784), (40_000, 50_000)])
def test_texts_with_coordinates_have_their_planned_length_at_any_pixel_budget(
    boxes: Path, tokenizer_directory: Path, tokenizer: Tokenizer, low: int, high: int
) -> None:
    config = DataConfig(
        sources=(SourceConfig(name="boxes", path=boxes, max_epochs=1),),
        tokenizer=tokenizer_directory,
        packing=PackingConfig(seq_length=2048),
        image=ImageConfig(min_pixels=low, max_pixels=high),
    )
    with Loader(config, global_batch_size=1, position_kind="rope") as loader:
        batches = list(loader)
        assert loader.report()["failed_samples"] == 0  # a length other than the planned one is a bad sample
    segments = [segment for batch in batches for segment in batch.samples]
    assert len(segments) == 4
    if (low, high) == (784, 784):
        start = next(
            s for b in batches for s, g in zip(b.cu_seqlens.tolist(), b.samples, strict=False) if g.sample_index == 3
        )
        text = tokenizer.backend.decode(batches[0].input_ids[start:].tolist(), skip_special_tokens=False)
        assert "(14,14)" in text
        assert "(0,0),(28,28) and (9,0),(14,28)" in text


def test_lengths_are_measured_once_and_kept_beside_the_index(
    boxes: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = ImageConfig()
    tokens = measure_directory(boxes, tokenizer, SampleRules(image=image))
    monkeypatch.setattr(measure_module, "_measure_sample", None)
    assert measure_directory(boxes, tokenizer, SampleRules(image=image)) == tokens
    with pytest.raises(TypeError):
        measure_directory(boxes, tokenizer, SMALL)  # coordinates: another budget, another length


def test_without_coordinates_the_pixel_budget_needs_no_new_measuring(
    shard_directories: dict[str, Path], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = measure_directory(shard_directories["images"], tokenizer, SampleRules(image=ImageConfig()))
    monkeypatch.setattr(measure_module, "_measure_sample", None)
    assert measure_directory(shard_directories["images"], tokenizer, SMALL) == tokens


def test_a_source_can_have_its_own_pixel_budget(shard_directories: dict[str, Path], tokenizer: Tokenizer) -> None:
    files = ShardFiles()

    def source(**limits: int) -> SourceIndex:
        config = SourceConfig(name="p", path=shard_directories["images"], **limits)
        whole = DataConfig(sources=(config,), tokenizer=Path("unused"), packing=PackingConfig(seq_length=64))
        return SourceIndex(config, whole, tokenizer, files)

    plain, small = source(), source(min_pixels=784, max_pixels=784)
    images = open_index(shard_directories["images"]).shards[0].samples["num_members"] - 1
    assert (small.lengths(0)[1] == 4 * images).all()
    assert (small.lengths(0)[0] < plain.lengths(0)[0]).all()
    files.close()


def long_talks(directory: Path) -> Path:
    """Conversations of one to eight turns, each turn with an image."""
    chooser = random.Random(4)
    rows = []
    for number in range(24):
        names, turns = [], []
        for turn in range(chooser.randint(1, 8)):
            height, width = chooser.choice([(28, 28), (56, 84), (100, 300)])
            names.append(f"{number}-{turn}.png")
            Image.new("RGB", (width, height)).save(directory / names[-1])
            turns.append({"from": "human", "value": "<image>" + "what? " * chooser.randint(1, 12)})
            turns.append({"from": "gpt", "value": "that " * chooser.randint(1, 12)})
        rows.append({"image": names, "conversations": turns})
    (directory / "rows.json").write_text(json.dumps(rows))
    write_shards(directory / "rows.json", directory / "shards", format="llava", samples_per_shard=100)
    index_directory(directory / "shards")
    return directory / "shards"


def test_where_turns_are_cut_what_is_planned_is_what_comes_out(
    tmp_path: Path, tokenizer_directory: Path, tokenizer: Tokenizer
) -> None:
    directory = long_talks(tmp_path)
    config = DataConfig(
        sources=(SourceConfig(name="talks", path=directory, max_epochs=1),),
        tokenizer=tokenizer_directory,
        packing=PackingConfig(seq_length=256, overflow="trim_turns"),
        image=ImageConfig(min_pixels=784, max_pixels=84 * 84),
    )
    with Loader(config, global_batch_size=1, position_kind="rope") as loader:
        batches = list(loader)
        assert loader.report()["failed_samples"] == 0
    segments = [segment for batch in batches for segment in batch.samples]
    whole = SampleRules(image=config.image)
    files = ShardFiles()
    (shard,) = open_index(directory).shards
    tokens, patches = shard_lengths(shard, rules=whole, tokenizer=tokenizer, files=files)
    assert len(segments) == 24  # none is dropped: one turn always fits
    assert sum(tokens > 256) > 5  # and many were too long
    trimmed = replace(whole, max_tokens=256)
    cut_tokens, cut_patches = shard_lengths(shard, rules=trimmed, tokenizer=tokenizer, files=files)
    assert {(s.sample_index, s.length) for s in segments} == set(enumerate(cut_tokens.tolist()))
    assert sum(len(batch.pixel_values) for batch in batches) == cut_patches.sum()
    assert (patches >= cut_patches).all()
    np.testing.assert_array_equal(cut_tokens[tokens <= 256], tokens[tokens <= 256])
    files.close()


def test_a_few_samples_are_measured_without_their_shard(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shard,) = open_index(long_talks(tmp_path)).shards
    files, rules = ShardFiles(), SampleRules(image=ImageConfig(), max_tokens=300)
    rows = np.array([7, 3, 3, 20])
    few = sample_lengths(shard, rows, rules=rules, tokenizer=tokenizer, files=files)
    assert not list(tmp_path.glob("shards/*.len"))
    every = shard_lengths(shard, rules=rules, tokenizer=tokenizer, files=files)
    for found, expected in zip(few, every, strict=True):
        np.testing.assert_array_equal(found, expected[rows])
    monkeypatch.setattr(measure_module, "_measure_sample", None)  # from now on only what is kept can answer
    for found, expected in zip(
        sample_lengths(shard, rows, rules=rules, tokenizer=tokenizer, files=files), every, strict=True
    ):
        np.testing.assert_array_equal(found, expected[rows])
    files.close()


def test_the_file_of_lengths_is_as_its_docstring_says(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (shard,) = open_index(long_talks(tmp_path)).shards
    files, rules = ShardFiles(), SampleRules(image=ImageConfig(min_pixels=784, max_pixels=784), max_tokens=100)
    tokens, patches = shard_lengths(shard, rules=rules, tokenizer=tokenizer, files=files)
    (path,) = tmp_path.glob("shards/*.len")
    digest = hashlib.sha256("\0".join([shard.digest, tokenizer.identity, repr(rules)]).encode()).hexdigest()[:16]
    assert path.name == f"shard-000000.{digest}.len"
    content = path.read_bytes()
    magic, count, crc = struct.unpack_from("<8sQI", content)
    assert (magic, count, crc) == (b"MVLLEN02", 24, zlib.crc32(content[20:]))
    pairs = list(struct.iter_unpack("<II", content[20:]))
    assert [text + kept for text, kept in pairs] == tokens.tolist()  # each image is one visual token here
    assert [4 * kept for _, kept in pairs] == patches.tolist()
    for damaged in (content[:-1], content[:30] + b"\xff" + content[31:], b"MVLLEN01" + content[8:], b""):
        path.write_bytes(damaged)
        again = shard_lengths(shard, rules=rules, tokenizer=tokenizer, files=files)
        np.testing.assert_array_equal(again[0], tokens)
        assert path.read_bytes() == content
    files.close()


def random_index(generator: np.random.Generator) -> ShardIndex:
    """An index of samples with images, videos and limits of their own, as index.py describes it."""
    samples = np.zeros(40, SAMPLE_DTYPE)
    members: list[tuple[int, ...]] = []
    for number in range(len(samples)):
        samples[number]["first_member"] = len(members)
        members.append((0, 0, 0, 0, 0, 0))
        for _ in range(generator.integers(0, 4)):
            height, width = np.exp(generator.uniform(1, 7.5, 2)).astype(int).tolist()
            frames = int(generator.integers(1, 400)) if generator.random() < 0.4 else 0
            members.append((0, 0, height, width, frames, float(generator.uniform(1, 60)) if frames else 0.0))
        samples[number]["num_members"] = len(members) - samples[number]["first_member"]
        for name in ("min_pixels", "max_pixels"):
            if generator.random() < 0.3:
                samples[number][name] = generator.integers(784, 20_000) * (1 if name == "min_pixels" else 25)
    return ShardIndex(
        name="a.tar", path=Path("a.tar"), digest="", samples=samples, members=np.array(members, MEMBER_DTYPE)
    )


@pytest.mark.parametrize("seed", range(5))
def test_patches_from_the_index_are_those_of_the_encoding(seed: int, tokenizer: Tokenizer) -> None:
    shard = random_index(np.random.default_rng(seed))
    rules = SampleRules(image=ImageConfig(max_pixels=200_000), video=VideoConfig(max_frames=32, total_pixels=400 * 784))
    every, all_media = np.arange(len(shard.samples)), shard.samples["num_members"]
    for entry, counted in zip(shard.samples, _patches(shard, every, all_media, rules).tolist(), strict=True):
        first = int(entry["first_member"])
        media = shard.members[first + 1 : first + int(entry["num_members"])]
        sizes = tuple(MediaSize(*member) for member in media[["height", "width", "frames", "fps"]].tolist())
        shown = [{"type": "video" if size.frames else "image"} for size in sizes]
        limits = {name: int(entry[name]) for name in ("min_pixels", "max_pixels") if entry[name]}
        record = json.dumps({"content": [*shown, "a"], **limits}).encode()
        raw = RawSample(key="", record=record, is_json=True, media=(b"",) * len(sizes), sizes=sizes)
        try:
            assert encode_sample(raw, rules=rules, tokenizer=tokenizer).num_patches == counted
        except SampleError:
            assert counted == -1
