# SPDX-License-Identifier: Apache-2.0
"""Rotary angles equal those of transformers for every kind of frequencies and axes."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from mindvl_model.language.rotary import rotary_angles, rotary_frequencies
from mindvl_model.language_config import YarnConfig
from mindvl_model.testing.tiny import smallest_config


def test_interleaved_sections_are_those_of_qwen3_vl() -> None:
    language = smallest_config().language
    rope = replace(language.rope, mrope_sections=(2, 1, 1), sections_interleaved=True)
    published = Qwen3VLTextRotaryEmbedding(
        Qwen3VLTextConfig(
            hidden_size=32,
            head_dim=8,
            rope_parameters={"rope_type": "default", "rope_theta": rope.rotary_base, "mrope_section": [2, 1, 1]},
        )
    )
    position_ids = torch.tensor([[0, 5, 9], [0, 7, 9], [0, 300, 9]])
    cos, sin = rotary_angles(replace(language, rope=rope), position_ids)
    expected = published(torch.zeros(1), position_ids[:, None])
    torch.testing.assert_close((cos, sin), (expected[0][0], expected[1][0]))


def test_yarn_scales_cosine_and_sine_and_rounds_its_bounds_outwards() -> None:
    language = smallest_config().language
    width = language.attention.rotary_width
    yarn = YarnConfig(factor=4.0, original_max_positions=128, mscale=1.0, mscale_all_dim=0.0)
    scaled = replace(language, rope=replace(language.rope, scaling=yarn, rotary_base=100.0))
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    config = Qwen3VLTextConfig(hidden_size=4 * width, num_attention_heads=4, head_dim=width, rope_parameters=parameters)
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    frequencies, own_factor = rotary_frequencies(scaled)
    torch.testing.assert_close(frequencies, expected)
    assert own_factor == pytest.approx(factor)
    assert factor > 1
    cos, sin = rotary_angles(scaled, torch.tensor([[0, 3, 50]] * 3))
    torch.testing.assert_close(cos.square() + sin.square(), torch.full((3, width), factor**2))
