# SPDX-License-Identifier: Apache-2.0
"""Tests of the recipes that the demo writes."""

from pathlib import Path

from mindvl_cli.demo.recipe import write_recipe
from mindvl_cli.demo.settings import BLOCK, FULL
from mindvl_cli.load import load_config
from mindvl_train import RunConfig


def test_a_recipe_loads_as_the_run_it_was_written_for(tmp_path: Path) -> None:
    path = write_recipe(
        tmp_path / "recipes" / "multitask.yaml",
        FULL,
        FULL.multitask,
        phase="multitask",
        out=tmp_path / "run",
        shards=tmp_path / "shards",
        tokenizer=tmp_path / "tokenizer",
        seed=7,
        init={"checkpoint": tmp_path / "warmup"},
    )

    config = load_config(path, RunConfig)

    assert config.model.vision == FULL.vision
    assert config.model.language == FULL.language
    assert config.init.checkpoint == tmp_path / "warmup"
    assert {source.name: source.weight for source in config.data.sources} == dict(FULL.multitask.weights)
    assert config.data.text_share == 0.2  # the paper's 8 to 2
    assert config.data.image.max_pixels == FULL.multitask.max_pixels * BLOCK
    assert (config.data.seed, config.seed) == (7, 7)
    assert config.trained_parts == ("vision", "projector", "language")


def test_the_sft_phases_differ_in_length_and_image_limit_alone_and_hold_as_much_text_as_images() -> None:
    assert len({phase.seq_length for phase in FULL.sft}) == 3
    assert len({phase.max_pixels for phase in FULL.sft}) == 3
    assert {phase.text_share for phase in FULL.sft} == {0.5}
