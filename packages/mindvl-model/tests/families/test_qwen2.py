# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL equals the transformers class in logits and all gradients (layouts: testing/test_layouts.py)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from mindvl_model.hf.inputs import pack_for
from mindvl_model.hf.load import load_hf_directory
from mindvl_model.testing.published import (
    SEGMENTS,
    gradients_under_published_names,
    make_segments,
    own_names,
    separate_calls,
)
from mindvl_model.testing.tiny import save_qwen2_5_vl, smallest_qwen2_5_vl

PADDING = 4


@pytest.fixture(params=[False, True], ids=["own head", "tied head"])
def pair(request: pytest.FixtureRequest, make_model: Callable[..., Any], tmp_path: Path) -> tuple[Any, Any]:
    config = smallest_qwen2_5_vl(tie_embeddings=request.param)
    published = save_qwen2_5_vl(config, tmp_path / "published")
    model = make_model(config, seed=9)
    load_hf_directory(model, config, tmp_path / "published")
    return model, published


@pytest.mark.parametrize("kind", SEGMENTS)
def test_logits_and_gradients_are_those_of_transformers(pair: tuple[Any, Any], kind: str) -> None:
    (model, published), config = pair, pair[0].mindvl
    segments = make_segments(config, kind)
    pack = pack_for(published, segments, config, padding=PADDING)
    expected, expected_loss = separate_calls(published, segments, config)
    assert (model.logits(**pack)[:-PADDING] - expected).abs().max() <= 1e-4 * expected.abs().max()
    loss = model(**pack)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    loss.backward()
    expected_loss.backward()
    actual = gradients_under_published_names(model, config)
    hf_parameters = own_names(published)
    assert actual.keys() == hf_parameters.keys()
    for name, parameter in hf_parameters.items():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert (actual[name] - wanted).abs().max() <= 1e-4 * wanted.abs().max(), name


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
    published = save_qwen2_5_vl(config, tmp_path / "published", dtype=torch.bfloat16)
    model = make_model(config, seed=9, dtype=torch.bfloat16)
    load_hf_directory(model, config, tmp_path / "published")
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
