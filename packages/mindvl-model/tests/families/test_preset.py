# SPDX-License-Identifier: Apache-2.0
"""Presets give the properties of their families, and refuse impossible sizes when they are created."""

import pytest

from mindvl_model import PRESETS, LanguageConfig, ModelError
from mindvl_model.language_config import GroupedQueryAttention, RopeConfig

SIZES = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_hidden_size": 40,
    "vocab_size": 64,
}


def test_a_preset_gives_the_properties_of_its_family() -> None:
    assert PRESETS["qwen3"](**SIZES, rotary_base=5.0).decoder() == LanguageConfig(
        family="qwen3",
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        ffn_hidden_size=40,
        vocab_size=64,
        attention=GroupedQueryAttention(num_kv_heads=2, head_dim=16, qk_norm=True),
        rope=RopeConfig(rotary_base=5.0),
    )


def test_every_preset_is_registered_under_its_kind() -> None:
    assert all(preset.kind == kind for kind, preset in PRESETS.items())


def test_impossible_sizes_are_refused_when_the_preset_is_created() -> None:
    with pytest.raises(ModelError, match="num_heads: must be a multiple of num_kv_heads=3, got 4"):
        PRESETS["qwen3"](**SIZES | {"num_kv_heads": 3})
