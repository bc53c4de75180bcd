# SPDX-License-Identifier: Apache-2.0
"""Packs: bytes read, bytes expected, samples that turn out failed."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mindvl_data import (
    DataConfig,
    ImageConfig,
    PackingConfig,
    SourceConfig,
    Tokenizer,
    index_directory,
    pack_builder,
    write_shards,
)
from mindvl_data.images import to_patches
from mindvl_data.order.data_order import DataOrder, Pack
from mindvl_data.order.sources import SourceIndex
from mindvl_data.pack_builder import PackBuilder
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import open_index
from mindvl_data.shards.reading import read_samples
from mindvl_data.types import RawSample

MakeConfig = Callable[..., DataConfig]


class Workshop:
    """A pack builder, and the packs of the first steps of its plan."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, steps: int = 4) -> None:
        measuring, self.files = ShardFiles(), ShardFiles()
        data_order = DataOrder(
            config, [SourceIndex(s, config, tokenizer, measuring) for s in config.sources], global_batch_size=4
        )
        measuring.close()
        sources = [SourceIndex(s, config, tokenizer, self.files) for s in config.sources]
        self.builder = PackBuilder(config, sources, tokenizer=tokenizer, files=self.files, position_kind="rope")
        ordered = [data_order.next_step() for _ in range(steps)]
        self.packs: list[Pack] = [pack for step in ordered if step is not None for pack in step.packs]


@pytest.fixture
def workshop(make_config: MakeConfig, tokenizer: Tokenizer) -> Iterator[Workshop]:
    workshop = Workshop(make_config(), tokenizer)
    yield workshop
    workshop.files.close()


def test_a_pack_reads_the_bytes_of_its_samples_and_no_others(
    workshop: Workshop, shard_directories: dict[str, Path]
) -> None:
    indexes = [open_index(directory) for directory in shard_directories.values()]
    for pack in workshop.packs:
        before = workshop.files.report()["bytes_read"]
        workshop.builder.build(1, pack)
        read = workshop.files.report()["bytes_read"] - before
        entries = [indexes[s.source].shards[s.shard].samples[s.sample_index] for s in pack]
        extents = sum(int(entry["length"]) + 512 for entry in entries)  # a header before each sample
        assert extents <= read <= 1.02 * extents


def test_the_bytes_expected_of_a_pack_are_nearly_those_it_has(workshop: Workshop) -> None:
    for pack in workshop.packs:
        built = workshop.builder.build(1, pack)
        tensors = [value for value in vars(built.batch).values() if isinstance(value, torch.Tensor)]
        assert built.num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert workshop.builder.expected_bytes(pack) == pytest.approx(built.num_bytes, rel=0.1, abs=1000)


def test_an_empty_pack_is_padding(workshop: Workshop) -> None:
    built = workshop.builder.build(5, ())
    assert (built.batch.step, built.batch.num_loss_tokens, built.batch.samples, built.failed) == (5, 0, (), ())


def test_a_sample_that_differs_from_the_index_is_returned_as_failed(
    make_config: MakeConfig, tokenizer: Tokenizer
) -> None:
    workshop = Workshop(make_config(), tokenizer)
    pack = workshop.packs[0]
    longer = (*pack[:1], pack[1]._replace(length=pack[1].length + 1), *pack[2:])
    fewer = next((pack, i) for pack in workshop.packs for i, sample in enumerate(pack) if sample.patches)
    smaller = tuple(s._replace(patches=s.patches - 4) if i == fewer[1] else s for i, s in enumerate(fewer[0]))
    built = workshop.builder.build(2, longer)
    (failed,) = built.failed
    assert (failed.step, failed.sample_index) == (2, pack[1].sample_index)
    assert failed.reason == f"has {pack[1].length} tokens, but {pack[1].length + 1} were indexed"
    assert [segment.failed for segment in built.batch.samples] == [False, True] + [False] * (len(pack) - 2)
    assert built.batch.samples[1].length == pack[1].length + 1
    (failed,) = workshop.builder.build(2, smaller).failed
    assert "patches, but" in failed.reason
    workshop.files.close()


def test_an_image_damaged_inside_is_bad_and_its_neighbours_are_not(
    make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for name in ("whole", "damaged"):
        Image.effect_noise((84, 84), 90).convert("RGB").save(tmp_path / f"{name}.png")
    content = bytearray((tmp_path / "damaged.png").read_bytes())
    content[len(content) // 2] ^= 0xFF  # header and end are whole, so the index takes it
    (tmp_path / "damaged.png").write_bytes(content)
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "4"}]
    records = [{"image": f"{name}.png", "conversations": turns} for name in ("whole", "damaged", "whole")]
    (tmp_path / "records.json").write_text(json.dumps(records))
    write_shards(tmp_path / "records.json", tmp_path / "shards", format="llava")
    index_directory(tmp_path / "shards")
    config = make_config(sources=(SourceConfig(name="photos", path=tmp_path / "shards", max_epochs=1),))
    workshop = Workshop(config, tokenizer)
    built = [workshop.builder.build(1, pack) for pack in workshop.packs]
    (failed,) = [sample for one in built for sample in one.failed]
    assert (failed.source, failed.shard, failed.sample_index) == (
        "photos",
        open_index(tmp_path / "shards").shards[0].name,
        1,
    )
    assert failed.key
    assert [s.sample_index for one in built for s in one.batch.samples if s.failed] == [1]
    assert sum(len(one.batch.samples) for one in built) == 3
    patches, _ = to_patches(np.asarray(Image.open(tmp_path / "whole.png")), config.image)
    found = np.concatenate([one.batch.pixel_values for one in built])
    np.testing.assert_array_equal(found, np.concatenate([patches, patches]))  # no gap where the damaged one was begun
    workshop.files.close()


def test_an_image_above_the_decode_limit_is_bad(make_config: MakeConfig, tokenizer: Tokenizer) -> None:
    image = ImageConfig(min_pixels=28 * 28, max_pixels=84 * 84, decode_limit=56 * 84)  # the largest has 84 x 140
    workshop = Workshop(make_config(image=image), tokenizer)
    built = [workshop.builder.build(1, pack) for pack in workshop.packs]
    reasons = {sample.reason for one in built for sample in one.failed}
    assert reasons == {
        "image of 84x140 pixels is larger than the decode limit of 4704 pixels. Resize it, or increase decode_limit"
    }
    assert all(segment.source == "images" for one in built for segment in one.batch.samples if segment.failed)
    workshop.files.close()


@pytest.fixture(scope="module")
def read_once(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer
) -> tuple[PackBuilder, Pack, list[RawSample]]:
    """A pack builder, a pack of three images (PNG, JPEG, WebP), and what is read for it."""
    root = tmp_path_factory.mktemp("fuzz")
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "4"}]
    for name in ("a.png", "b.jpg", "c.webp"):
        Image.effect_noise((84, 56), 90).convert("RGB").save(root / name)
    (root / "records.json").write_text(
        json.dumps([{"image": name, "conversations": turns} for name in ("a.png", "b.jpg", "c.webp")])
    )
    write_shards(root / "records.json", root / "shards", format="llava")
    index_directory(root / "shards")
    config = DataConfig(
        sources=(SourceConfig(name="photos", path=root / "shards", max_epochs=1),),
        tokenizer=root,
        packing=PackingConfig(seq_length=256),
        image=ImageConfig(min_pixels=28 * 28),
    )
    workshop = Workshop(config, tokenizer, steps=1)
    pack = workshop.packs[0]
    shard = open_index(root / "shards").shards[0]
    samples = read_samples(shard, [sample.sample_index for sample in pack], workshop.files)
    workshop.files.close()
    return workshop.builder, pack, [sample for sample in samples if isinstance(sample, RawSample)]


@st.composite
def damages(draw: st.DrawFn) -> tuple[int, bool, list[tuple[float, int]], float]:
    """Which sample, whether its record or its image, bytes to change, and how much of it is left."""
    changes = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=8)
    return draw(st.integers(0, 2)), draw(st.booleans()), draw(changes), draw(st.sampled_from([1.0, 1.0, 0.9, 0.3, 0.0]))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(damage=damages())
def test_whatever_bytes_come_a_pack_keeps_its_lengths(
    read_once: tuple[PackBuilder, Pack, list[RawSample]], damage: tuple[int, bool, list[tuple[float, int]], float]
) -> None:
    builder, pack, samples = read_once
    number, in_record, changes, left = damage
    content = bytearray(samples[number].record if in_record else samples[number].media[0])
    for place, value in changes:
        content[int(place * len(content))] = value
    damaged = bytes(content[: int(left * len(content))])
    changed = replace(samples[number], **({"record": damaged} if in_record else {"media": (damaged,)}))
    given_samples = [changed if place == number else sample for place, sample in enumerate(samples)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pack_builder, "read_samples", lambda *where: given_samples)
        built = builder.build(1, pack)
    assert [segment.length for segment in built.batch.samples] == [sample.length for sample in pack]
    assert [segment.failed for segment in built.batch.samples] in (
        [place == number for place in range(3)],
        [False] * 3,
    )
    assert built.batch.cu_seqlens[3] == sum(sample.length for sample in pack)
    assert len(built.batch.pixel_values) == built.batch.image_grid_thw.prod(dim=1).sum()
