# SPDX-License-Identifier: Apache-2.0
"""Language models that cannot be built are refused by name."""

from dataclasses import replace
from typing import Any

import pytest

from mindvl_model import ModelError, named_config


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        ("tiny", {"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ("tiny", {"head_dim": 7}, "head_dim=7 is odd"),
        ("qwen2.5-vl-7b", {"mrope_sections": (16, 24, 25)}, "give 65 pairs, but head_dim=128 has 64"),
        ("mindvl-671b-a37b", {"experts_per_token": 0}, "experts_per_token=0 of num_experts=256"),
        ("mindvl-671b-a37b", {"num_expert_groups": 7}, "num_experts=256 in num_expert_groups=7"),
        ("mindvl-671b-a37b", {"num_dense_layers": 62}, "num_dense_layers=62 of num_layers=61"),
        ("mindvl-671b-a37b", {"rope_head_dim": 63}, "rope_head_dim=63 is odd"),
    ],
)
def test_impossible_language_models_are_refused(size: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(named_config(size).language, **changes)
