# SPDX-License-Identifier: Apache-2.0
"""Lengths: what is planned is what comes out, whatever the pixel budget; measured once."""

import json
from pathlib import Path

import pytest
from PIL import Image

from mindvl_data import (
    DataConfig,
    ImageConfig,
    Loader,
    PackingConfig,
    SourceConfig,
    Tokenizer,
    index_folder,
    write_shards,
)
from mindvl_data import measure as measure_module
from mindvl_data.config import SampleRules
from mindvl_data.measure import measure_folder
from mindvl_data.plan.sources import SourceIndex
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import open_index

SMALL = SampleRules(image=ImageConfig(max_pixels=5000))


@pytest.fixture
def boxes(tmp_path: Path) -> Path:
    """Boxes whose numbers have more or fewer digits in the resized picture."""
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
    index_folder(tmp_path / "shards")
    return tmp_path / "shards"


@pytest.mark.parametrize(("low", "high"), [(784, 784), (784, 9 * 784), (3136, 1280 * 784), (40_000, 50_000)])
def test_texts_with_coordinates_have_their_planned_length_at_any_pixel_budget(
    boxes: Path, tokenizer_folder: Path, tokenizer: Tokenizer, low: int, high: int
) -> None:
    config = DataConfig(
        sources=(SourceConfig(name="boxes", path=boxes, max_epochs=1),),
        tokenizer=tokenizer_folder,
        packing=PackingConfig(seq_length=2048),
        image=ImageConfig(min_pixels=low, max_pixels=high),
    )
    with Loader(config, packs_per_step=1, position_kind="rope") as loader:
        batches = list(loader)
        assert loader.report()["bad_samples"] == 0  # a length other than the planned one is a bad sample
    segments = [segment for batch in batches for segment in batch.segments]
    assert len(segments) == 4
    if (low, high) == (784, 784):
        start = next(s for b in batches for s, g in zip(b.cu_seqlens.tolist(), b.segments, strict=False) if g.row == 3)
        text = tokenizer.hf.decode(batches[0].input_ids[start:])
        assert "(14,14)" in text
        assert "(0,0),(28,28) and (9,0),(14,28)" in text


def test_lengths_are_measured_once_and_kept_beside_the_index(
    boxes: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = ImageConfig()
    tokens = measure_folder(boxes, tokenizer, SampleRules(image=image))
    monkeypatch.setattr(measure_module, "_measure_sample", None)
    assert measure_folder(boxes, tokenizer, SampleRules(image=image)) == tokens
    with pytest.raises(TypeError):
        measure_folder(boxes, tokenizer, SMALL)  # coordinates: another budget, another length


def test_without_coordinates_the_pixel_budget_needs_no_new_measuring(
    shard_folders: dict[str, Path], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = measure_folder(shard_folders["pictures"], tokenizer, SampleRules(image=ImageConfig()))
    monkeypatch.setattr(measure_module, "_measure_sample", None)
    assert measure_folder(shard_folders["pictures"], tokenizer, SMALL) == tokens


def test_a_source_can_have_its_own_pixel_budget(shard_folders: dict[str, Path], tokenizer: Tokenizer) -> None:
    files = ShardFiles()

    def source(**limits: int) -> SourceIndex:
        config = SourceConfig(name="p", path=shard_folders["pictures"], **limits)
        whole = DataConfig(sources=(config,), tokenizer=Path("unused"), packing=PackingConfig(seq_length=64))
        return SourceIndex(config, whole, tokenizer, files)

    plain, small = source(), source(min_pixels=784, max_pixels=784)
    images = open_index(shard_folders["pictures"]).shards[0].samples["num_members"] - 1
    assert (small.lengths(0)[1] == 4 * images).all()
    assert (small.lengths(0)[0] < plain.lengths(0)[0]).all()
    files.close()
