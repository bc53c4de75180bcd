# SPDX-License-Identifier: Apache-2.0
"""Rows: bytes read, bytes expected, samples that turn out bad."""

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
    index_folder,
    rows,
    write_shards,
)
from mindvl_data.images import to_patches
from mindvl_data.plan.planner import Planner, Row
from mindvl_data.plan.sources import SourceIndex
from mindvl_data.rows import RowMaker
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import open_index
from mindvl_data.shards.reading import read_samples
from mindvl_data.types import RawSample

MakeConfig = Callable[..., DataConfig]


class Workshop:
    """A maker of rows, and the rows of the first steps of its plan."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, steps: int = 4) -> None:
        measuring, self.files = ShardFiles(), ShardFiles()
        planner = Planner(
            config, [SourceIndex(s, config, tokenizer, measuring) for s in config.sources], rows_per_step=4
        )
        measuring.close()
        sources = [SourceIndex(s, config, tokenizer, self.files) for s in config.sources]
        self.maker = RowMaker(config, sources, tokenizer=tokenizer, files=self.files, position_kind="rope")
        planned = [planner.next_step() for _ in range(steps)]
        self.rows: list[Row] = [row for step in planned if step is not None for row in step.rows]


@pytest.fixture
def workshop(make_config: MakeConfig, tokenizer: Tokenizer) -> Iterator[Workshop]:
    workshop = Workshop(make_config(), tokenizer)
    yield workshop
    workshop.files.close()


def test_a_row_reads_the_bytes_of_its_samples_and_no_others(workshop: Workshop, shard_folders: dict[str, Path]) -> None:
    indexes = [open_index(folder) for folder in shard_folders.values()]
    for row in workshop.rows:
        before = workshop.files.report()["bytes_read"]
        workshop.maker.make(1, row)
        read = workshop.files.report()["bytes_read"] - before
        entries = [indexes[s.source].shards[s.shard].samples[s.row] for s in row]
        extents = sum(int(entry["length"]) + 512 for entry in entries)  # a header before each sample
        assert extents <= read <= 1.02 * extents


def test_the_bytes_expected_of_a_row_are_nearly_those_it_has(workshop: Workshop) -> None:
    for row in workshop.rows:
        made = workshop.maker.make(1, row)
        tensors = [value for value in vars(made.batch).values() if isinstance(value, torch.Tensor)]
        assert made.num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert workshop.maker.expected_bytes(row) == pytest.approx(made.num_bytes, rel=0.1, abs=1000)


def test_an_empty_row_is_padding(workshop: Workshop) -> None:
    made = workshop.maker.make(5, ())
    assert (made.batch.step, made.batch.num_label_tokens, made.batch.segments, made.bad) == (5, 0, (), ())


def test_what_turns_out_other_than_planned_is_told_with_its_place(
    make_config: MakeConfig, tokenizer: Tokenizer
) -> None:
    workshop = Workshop(make_config(), tokenizer)
    row = workshop.rows[0]
    longer = (*row[:1], row[1]._replace(length=row[1].length + 1), *row[2:])
    fewer = next((row, i) for row in workshop.rows for i, sample in enumerate(row) if sample.patches)
    smaller = tuple(s._replace(patches=s.patches - 4) if i == fewer[1] else s for i, s in enumerate(fewer[0]))
    made = workshop.maker.make(2, longer)
    (bad,) = made.bad
    assert (bad.step, bad.row) == (2, row[1].row)
    assert bad.reason == f"{row[1].length} tokens instead of the planned {row[1].length + 1}"
    assert [segment.bad for segment in made.batch.segments] == [False, True] + [False] * (len(row) - 2)
    assert made.batch.segments[1].length == row[1].length + 1
    (bad,) = workshop.maker.make(2, smaller).bad
    assert "patches instead of the planned" in bad.reason
    workshop.files.close()


def test_a_picture_damaged_inside_is_bad_and_its_neighbours_are_not(
    make_config: MakeConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for name in ("whole", "damaged"):
        Image.effect_noise((84, 84), 90).convert("RGB").save(tmp_path / f"{name}.png")
    content = bytearray((tmp_path / "damaged.png").read_bytes())
    content[len(content) // 2] ^= 0xFF  # header and end are whole, so the index takes it
    (tmp_path / "damaged.png").write_bytes(content)
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "4"}]
    records = [{"image": f"{name}.png", "conversations": turns} for name in ("whole", "damaged", "whole")]
    (tmp_path / "rows.json").write_text(json.dumps(records))
    write_shards(tmp_path / "rows.json", tmp_path / "shards", format="llava")
    index_folder(tmp_path / "shards")
    config = make_config(sources=(SourceConfig(name="photos", path=tmp_path / "shards", max_epochs=1),))
    workshop = Workshop(config, tokenizer)
    made = [workshop.maker.make(1, row) for row in workshop.rows]
    (bad,) = [bad for one in made for bad in one.bad]
    assert (bad.source, bad.shard, bad.row) == ("photos", open_index(tmp_path / "shards").shards[0].name, 1)
    assert bad.key
    assert [s.row for one in made for s in one.batch.segments if s.bad] == [1]
    assert sum(len(one.batch.segments) for one in made) == 3
    patches, _ = to_patches(np.asarray(Image.open(tmp_path / "whole.png")), config.image)
    found = np.concatenate([one.batch.pixel_values for one in made])
    np.testing.assert_array_equal(found, np.concatenate([patches, patches]))  # no gap where the damaged one was begun
    workshop.files.close()


def test_a_picture_above_the_decode_limit_is_bad(make_config: MakeConfig, tokenizer: Tokenizer) -> None:
    image = ImageConfig(min_pixels=28 * 28, max_pixels=84 * 84, decode_limit=56 * 84)  # the largest has 84 x 140
    workshop = Workshop(make_config(image=image), tokenizer)
    made = [workshop.maker.make(1, row) for row in workshop.rows]
    reasons = {bad.reason for one in made for bad in one.bad}
    assert reasons == {
        "image of 84x140 pixels is larger than the decode limit of 4704 pixels. Make it smaller, or raise decode_limit"
    }
    assert all(segment.source == "pictures" for one in made for segment in one.batch.segments if segment.bad)
    workshop.files.close()


@pytest.fixture(scope="module")
def read_once(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> tuple[RowMaker, Row, list[RawSample]]:
    """A maker, a row of three pictures (PNG, JPEG, WebP), and what is read for it."""
    root = tmp_path_factory.mktemp("fuzz")
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "4"}]
    for name in ("a.png", "b.jpg", "c.webp"):
        Image.effect_noise((84, 56), 90).convert("RGB").save(root / name)
    (root / "rows.json").write_text(
        json.dumps([{"image": name, "conversations": turns} for name in ("a.png", "b.jpg", "c.webp")])
    )
    write_shards(root / "rows.json", root / "shards", format="llava")
    index_folder(root / "shards")
    config = DataConfig(
        sources=(SourceConfig(name="photos", path=root / "shards", max_epochs=1),),
        tokenizer=root,
        packing=PackingConfig(seq_length=256),
        image=ImageConfig(min_pixels=28 * 28),
    )
    workshop = Workshop(config, tokenizer, steps=1)
    row = workshop.rows[0]
    shard = open_index(root / "shards").shards[0]
    samples = read_samples(shard, [planned.row for planned in row], workshop.files)
    workshop.files.close()
    return workshop.maker, row, [sample for sample in samples if isinstance(sample, RawSample)]


@st.composite
def damages(draw: st.DrawFn) -> tuple[int, bool, list[tuple[float, int]], float]:
    """Which sample, whether its record or its picture, bytes to change, and how much of it is left."""
    changes = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=8)
    return draw(st.integers(0, 2)), draw(st.booleans()), draw(changes), draw(st.sampled_from([1.0, 1.0, 0.9, 0.3, 0.0]))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(damage=damages())
def test_whatever_bytes_come_a_row_keeps_its_lengths(
    read_once: tuple[RowMaker, Row, list[RawSample]], damage: tuple[int, bool, list[tuple[float, int]], float]
) -> None:
    maker, row, samples = read_once
    number, in_record, changes, left = damage
    content = bytearray(samples[number].record if in_record else samples[number].media[0])
    for place, value in changes:
        content[int(place * len(content))] = value
    damaged = bytes(content[: int(left * len(content))])
    changed = replace(samples[number], **({"record": damaged} if in_record else {"media": (damaged,)}))
    given_samples = [changed if place == number else sample for place, sample in enumerate(samples)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rows, "read_samples", lambda *where: given_samples)
        made = maker.make(1, row)
    assert [segment.length for segment in made.batch.segments] == [planned.length for planned in row]
    assert [segment.bad for segment in made.batch.segments] in (
        [place == number for place in range(3)],
        [False] * 3,
    )
    assert made.batch.cu_seqlens[3] == sum(planned.length for planned in row)
    assert len(made.batch.pixel_values) == made.batch.image_grid_thw.prod(dim=1).sum()
