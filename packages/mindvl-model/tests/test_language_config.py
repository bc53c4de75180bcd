# SPDX-License-Identifier: Apache-2.0
"""Invalid configurations of language models raise errors that name the field."""

from dataclasses import replace
from typing import Any

import pytest

from mindvl_model import ModelError, named_config


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        ("tiny", {"num_kv_heads": 3}, "num_heads: must be a multiple of num_kv_heads=3, got 4"),
        ("tiny", {"head_dim": 7}, "head_dim: must be even .*, got 7"),
        ("qwen2.5-vl-7b", {"mrope_sections": (16, 24, 25)}, "must add up to head_dim / 2 = 64 rotary pairs, .* 65"),
        ("mindvl-671b-a37b", {"experts_per_token": 0}, "experts_per_token: .* num_experts=256, got 0"),
        ("mindvl-671b-a37b", {"num_expert_groups": 7}, "num_expert_groups: must divide num_experts=256 .*, got 7"),
        ("mindvl-671b-a37b", {"num_dense_layers": 62}, "num_dense_layers: .* num_layers=61, got 62"),
        ("mindvl-671b-a37b", {"rope_head_dim": 63}, "rope_head_dim: must be even .*, got 63"),
    ],
)
def test_impossible_language_models_are_refused(size: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(named_config(size).language, **changes)
