# SPDX-License-Identifier: Apache-2.0
"""Choices of a first recipe from lengths and sizes made by hand."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindvl_cli.failures import CliError
from mindvl_cli.starting_recipe import (
    Facts,
    Measured,
    choose_image,
    choose_precision,
    choose_seq_length,
    choose_steps,
    measure_sample,
    model_facts,
    recipe_text,
)
from mindvl_data import DataConfig, ImageConfig, Loader, PackingConfig, SourceConfig, load_tokenizer
from mindvl_data.shards.index import open_index

FACTS = Facts(min_pixels=3136, max_pixels=12_845_056, has_pixels=True, max_positions=128_000, dtype="bfloat16")


def _measured(lengths: list[int], *, areas: tuple[int, ...] = (), num_samples: int = 0) -> Measured:
    tokens = np.array(lengths, np.int64)
    return Measured(
        lengths=tokens, visual=tokens // 2, areas=np.array(areas, np.int64), num_samples=num_samples or len(lengths)
    )


def test_the_measured_lengths_are_those_that_the_loader_gives_and_areas_those_of_the_files(tiny_place: Path) -> None:
    image = ImageConfig(min_pixels=3136, max_pixels=9408)
    shards, tokenizer = tiny_place / "shards" / "pages", load_tokenizer(tiny_place / "tokenizer")
    measured = measure_sample(open_index(shards), tokenizer, image)
    config = DataConfig(
        sources=(SourceConfig(name="pages", path=shards, max_epochs=1),),
        tokenizer=tiny_place / "tokenizer",
        packing=PackingConfig(seq_length=1024),
        image=image,
        num_threads=0,
    )
    with Loader(config, global_batch_size=1, position_kind="rope") as loader:
        batches = list(loader)
    loaded = [sample.length for batch in batches for sample in batch.samples]
    assert sorted(measured.lengths.tolist()) == sorted(loaded)
    assert measured.visual.sum() * 4 == sum(len(batch.pixel_values) for batch in batches)
    files = [Image.open(path) for path in (tiny_place / "pages-raw").glob("*.png")]
    assert sorted(measured.areas.tolist()) == sorted(file.width * file.height for file in files)


def test_samples_that_the_chat_template_refuses_are_not_measured(tiny_place: Path, tmp_path: Path) -> None:
    tokenizer = shutil.copytree(tiny_place / "tokenizer", tmp_path / "tokenizer")
    template = tokenizer / "chat_template.jinja"
    refusal = "{%- if 'what is written' in messages | string -%}{{- raise_exception('no') -}}{%- endif -%}"
    template.write_text(refusal + template.read_text())
    with pytest.raises(CliError, match="none of 24 samples is valid"):
        measure_sample(open_index(tiny_place / "shards" / "pages"), load_tokenizer(tokenizer), ImageConfig())


def test_the_sequence_length_holds_999_of_1000_samples_but_not_the_longest() -> None:
    chosen, why = choose_seq_length(FACTS, _measured([1500] * 1999 + [9000]))
    assert chosen == 2048
    assert "99.9 % of 2000 samples have at most 1500 tokens" in why
    assert "The 1 longer samples among them are dropped." in why


def test_two_long_samples_in_a_thousand_raise_the_sequence_length() -> None:
    assert choose_seq_length(FACTS, _measured([1500] * 998 + [9000] * 2))[0] == 16384


@pytest.mark.parametrize(("positions", "chosen"), [(5000, 4096), (512, 512), (None, 16384)])
def test_the_sequence_length_stays_within_the_limit_of_the_model(positions: int | None, chosen: int) -> None:
    facts = Facts(min_pixels=3136, max_pixels=50_176, has_pixels=True, max_positions=positions, dtype=None)
    assert choose_seq_length(facts, _measured([9000] * 10))[0] == chosen


def test_a_step_has_64_samples_and_steps_follow_from_the_epochs() -> None:
    # 100,000 samples of 512 tokens: 4 fill a sequence of 2048, so 16 sequences per step and 25,000 per epoch.
    found = choose_steps(_measured([512] * 100, num_samples=100_000), 2048, epochs=2, num_devices=8)
    assert found[:2] == (16, 3125)
    assert "2 epochs: 100000 samples are about 25000.0 packed sequences" in found[3]


def test_the_batch_is_a_multiple_of_the_devices_and_few_samples_give_a_small_one() -> None:
    assert choose_steps(_measured([512] * 100), 2048, epochs=4, num_devices=8)[:2] == (8, 12)  # 25 sequences per epoch
    assert choose_steps(_measured([512] * 100), 2048, epochs=4, num_devices=1)[:2] == (2, 50)


def test_data_in_which_every_sample_is_too_long_are_refused() -> None:
    with pytest.raises(CliError, match="each of 3 measured samples is longer than 512 tokens"):
        choose_steps(_measured([600] * 3), 512, epochs=1, num_devices=1)


def test_the_largest_image_replaces_a_limit_that_is_four_times_larger() -> None:
    given = ImageConfig(min_pixels=3136, max_pixels=12_845_056)
    image, why = choose_image(FACTS, given, _measured([9], areas=(10_000, 100_000)))
    assert image.max_pixels == 100_352  # 128 blocks of 784
    assert "median 55000 pixels, largest 100000" in why
    assert choose_image(FACTS, given, _measured([9], areas=(4_000_000,)))[0] == given
    assert choose_image(FACTS, given, _measured([9]))[0] == given


@pytest.mark.parametrize(
    ("dtype", "precision"), [("bfloat16", "bf16"), ("torch.float16", "bf16"), ("float32", "fp32"), (None, "fp32")]
)
def test_the_precision_follows_the_directory(dtype: str | None, precision: str) -> None:
    assert choose_precision(dtype)[0] == precision


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("preprocessor_config.json", {"min_pixels": 3136, "max_pixels": 9408}),
        ("preprocessor_config.json", {"size": {"shortest_edge": 3136, "longest_edge": 9408}}),
        ("processor_config.json", {"image_processor": {"size": {"min_pixels": 3136, "max_pixels": 9408}}}),
    ],
)
def test_the_limits_of_every_version_of_a_preprocessor_are_read(tmp_path: Path, name: str, stored: object) -> None:
    text = {"max_position_embeddings": 4096, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    (tmp_path / name).write_text(json.dumps(stored))
    found = model_facts(tmp_path)
    assert found == Facts(min_pixels=3136, max_pixels=9408, has_pixels=True, max_positions=4096, dtype="bfloat16")


@pytest.mark.parametrize("stored", [{}, {"size": 224}, {"image_processor": "slow"}])
def test_without_limits_in_the_preprocessor_those_of_mindvl_are_used(tmp_path: Path, stored: object) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stored))
    found = model_facts(tmp_path)
    assert (found.max_pixels, found.has_pixels) == (ImageConfig.max_pixels, False)


def test_comments_precede_the_keys_that_they_name() -> None:
    values = {"out": "a", "data": {"sources": [{"name": "x", "out": "b"}], "image": {"out": 1}}}
    text = recipe_text(values, {"out": "First.", "data.image.out": "Last."}, "Head.")
    assert text.splitlines() == [
        "# Head.",
        "# First.",
        "out: a",
        "data:",
        "  sources:",
        "  - name: x",
        "    out: b",
        "  image:",
        "    # Last.",
        "    out: 1",
    ]
