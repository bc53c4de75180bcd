# SPDX-License-Identifier: Apache-2.0
"""Rotary angles equal those of transformers for every kind of frequencies and axes."""

from dataclasses import replace

import torch
from transformers import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from mindvl_model.language.rotary import rotary_angles
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
