# SPDX-License-Identifier: Apache-2.0
"""Tests of the vision encoder's pre-training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindvl_cli.demo.backbones import pretrain_vision
from mindvl_cli.demo.settings import FULL
from mindvl_cli.demo.tasks import sample_texts
from mindvl_cli.demo.tokenizer import train_tokenizer
from mindvl_data import load_tokenizer
from mindvl_model import MindVLConfig, TokenConfig, for_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(sample_texts(num_samples=50, seed=0), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def config(tokenizer: Path) -> MindVLConfig:
    known = load_tokenizer(tokenizer)
    unset = TokenConfig(image=0, vision_start=0, vision_end=0, end_of_turn=0, pad=0)
    small = MindVLConfig(
        vision=replace(FULL.vision, hidden_size=48, num_layers=1, num_heads=3, full_attention_layers=(0,)),
        language=replace(FULL.language, num_layers=1).decoder(),
        tokens=unset,
    )
    return for_tokenizer(small, known.special_ids, known.vocab_size)


def test_the_vision_encoder_learns_digits_and_the_same_seed_gives_the_same_weights(
    tmp_path: Path, tokenizer: Path, config: MindVLConfig
) -> None:
    settings = replace(FULL.vision_backbone, num_images=300, steps=150, batch_size=32)

    def run(name: str) -> dict[str, Any]:
        return pretrain_vision(
            tmp_path / name, config, settings, tokenizer=tokenizer, seed=3, on_step=lambda step, loss: None
        )

    first, second = run("first"), run("second")

    assert first == second
    assert first["curve"][-1][1] < 0.8 * first["curve"][0][1]
    assert first["validation_accuracy"] > 0.2  # of ten digits, on scans that were not trained on
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]
