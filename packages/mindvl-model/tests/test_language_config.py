# SPDX-License-Identifier: Apache-2.0
"""Invalid configurations of language models raise errors that name the field."""

from typing import Any

import pytest

from mindvl_model import PRESETS, ModelError

GROUPED = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_hidden_size": 40,
    "vocab_size": 64,
}
LATENT = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_hidden_size": 40,
    "vocab_size": 64,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "nope_head_dim": 8,
    "rope_head_dim": 8,
    "value_head_dim": 8,
    "num_dense_layers": 1,
    "num_experts": 16,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 8,
}
SIZES = {"qwen3": GROUPED, "qwen2": GROUPED | {"mrope_sections": (2, 1, 1)}, "deepseek_v3": LATENT}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3", {"num_kv_heads": 3}, "num_heads: must be a multiple of num_kv_heads=3, got 4"),
        ("qwen3", {"head_dim": 7}, "head_dim: must be even .*, got 7"),
        ("qwen2", {"mrope_sections": (2, 1, 2)}, "must add up to head_dim / 2 = 4 rotary pairs, .* 5"),
        ("deepseek_v3", {"experts_per_token": 0}, "experts_per_token: .* num_experts=16, got 0"),
        ("deepseek_v3", {"num_expert_groups": 7}, "num_expert_groups: must divide num_experts=16 .*, got 7"),
        (
            "deepseek_v3",
            {"num_expert_groups": 8, "groups_per_token": 2, "experts_per_token": 5},
            "experts_per_token: 5 experts of 2 groups with 2 experts are not supported",
        ),
        ("deepseek_v3", {"num_expert_groups": 16}, "experts_per_token: 2 experts of 4 groups with 1 experts are not"),
        ("deepseek_v3", {"num_dense_layers": 3}, "num_dense_layers: .* num_layers=2, got 3"),
        ("deepseek_v3", {"rope_head_dim": 63}, "rope_head_dim: must be even .*, got 63"),
    ],
)
def test_impossible_language_models_are_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        PRESETS[kind](**SIZES[kind] | changes)
