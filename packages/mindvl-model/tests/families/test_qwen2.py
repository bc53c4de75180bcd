# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL equals the transformers class in logits and all gradients (layouts: testing/test_layouts.py)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from mindvl_model.hf.inputs import pack_for
from mindvl_model.testing.published import (
    SEGMENTS,
    assert_equals_published,
    make_segments,
    separate_calls,
)
from mindvl_model.testing.tiny import published_pair, smallest_qwen2_5_vl


@pytest.fixture(params=[False, True], ids=["own head", "tied head"])
def pair(request: pytest.FixtureRequest, make_model: Callable[..., Any], tmp_path: Path) -> tuple[Any, Any]:
    return published_pair(smallest_qwen2_5_vl(tie_embeddings=request.param), make_model, tmp_path)


@pytest.mark.parametrize("kind", SEGMENTS)
def test_logits_and_gradients_are_those_of_transformers(pair: tuple[Any, Any], kind: str) -> None:
    assert_equals_published(*pair, kind)


def test_positions_of_three_axes_matter(pair: tuple[Any, Any]) -> None:
    (model, published), config = pair, pair[0].mindvl
    segments = make_segments(config, "a video")
    pack = pack_for(published, segments, config)
    expected, _ = separate_calls(published, segments, config)
    pack["position_ids"] = torch.arange(len(expected)).expand(3, -1)
    assert (model.logits(**pack) - expected).abs().max() > 1e-2 * expected.abs().max()


@torch.no_grad()
def test_bfloat16_stays_within_five_thousandths(make_model: Callable[..., Any], tmp_path: Path) -> None:
    config = smallest_qwen2_5_vl()
    model, published = published_pair(config, make_model, tmp_path, dtype=torch.bfloat16)
    segments = make_segments(config, "all of them packed")
    pack = pack_for(published, segments, config)
    expected = separate_calls(published, segments, config)[0].float()
    error = (model.logits(**pack).float() - expected).abs()
    assert error.mean() <= 0.005 * expected.abs().max()


@pytest.mark.parametrize("tied", [False, True])
def test_the_language_model_without_m_rope_is_that_of_transformers(
    assert_published_parity: Callable[..., None], tied: bool
) -> None:
    assert_published_parity(
        Qwen2Config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=40,
            vocab_size=64,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
        )
    )
