# SPDX-License-Identifier: Apache-2.0
"""dots1 equals Dots1ForCausalLM of transformers; windows and routing that mindvl does not have are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Dots1Config

from mindvl_model import ModelError, WeightError, named_config
from mindvl_model.counts import count_parameters
from mindvl_model.families.dots1 import Dots1Preset
from mindvl_model.families.registry import write_language
from mindvl_model.hf.directory_config import language_config_from_directory

# Keys and sizes of dots.llm1.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Dots1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 32768,
    "max_window_layers": 62,
    "model_type": "dots1",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "noaux_tc",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "vocab_size": 152064,
}
SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "vocab_size": 64,
    "max_position_embeddings": 512,
}


def read(directory: Path, document: dict[str, Any]) -> Any:
    (directory / "config.json").write_text(json.dumps(document))
    return language_config_from_directory(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"first_k_dense_replace": 1, "head_dim": 10, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        {"first_k_dense_replace": 2, "attention_bias": True, "tie_word_embeddings": True, "n_shared_experts": 1},
    ],
    ids=["experts in every layer", "groups of experts, odd heads", "biases, tied embeddings"],
)
def test_logits_and_gradients_are_those_of_transformers(
    assert_published_parity: Callable[..., None], changes: dict[str, Any]
) -> None:
    assert_published_parity(Dots1Config(**SIZES | changes))


def test_the_published_model_is_the_preset_with_its_sizes(tmp_path: Path) -> None:
    preset = Dots1Preset(
        hidden_size=4096,
        num_layers=62,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        ffn_hidden_size=10944,
        vocab_size=152064,
        num_experts=128,
        experts_per_token=6,
        expert_ffn_hidden_size=1408,
    )
    language = read(tmp_path, PUBLISHED)
    assert language == preset.decoder()
    counts = count_parameters(replace(named_config("tiny"), language=language))
    assert counts.language // 10**9 == 142  # 142B parameters, arXiv 2506.05767


def test_missing_keys_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    dropped = ("first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor", "num_key_value_heads")
    language = read(tmp_path, {name: value for name, value in PUBLISHED.items() if name not in dropped})
    default = Dots1Config()
    assert language.attention.num_kv_heads == default.num_key_value_heads
    assert language.num_dense_layers == default.first_k_dense_replace
    assert language.experts.num_expert_groups == default.n_group
    assert language.experts.groups_per_token == default.topk_group
    assert language.experts.routed_scale == default.routed_scaling_factor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 4096, "max_window_layers": 61}, "sliding_window=4096 is not supported, because it is narr"),
        ({"layer_types": ["sliding_attention"] * 62}, "layer_types=.* is not supported; it must be a list of full_att"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported; it must be true"),
        ({"norm_topk_prob": None}, "norm_topk_prob=None is not supported; it must be true"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ({"n_shared_experts": None}, "n_shared_experts=None is not supported; it must be an integer above 0"),
    ],
)
def test_values_that_are_not_supported_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightError, match=rf"config.json: {message}"):
        read(tmp_path, PUBLISHED | changes)


@pytest.mark.parametrize("changes", [{"max_window_layers": 62}, {"layer_types": ["full_attention"] * 62}])
def test_a_window_that_no_layer_has_is_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    expected = read(tmp_path, PUBLISHED)
    assert read(tmp_path, PUBLISHED | {"sliding_window": 4096, "max_window_layers": 1} | changes) == expected


def test_a_model_without_shared_experts_is_not_exported(tmp_path: Path) -> None:
    language = read(tmp_path, PUBLISHED)
    with pytest.raises(ModelError, match=r"num_shared_experts: .* got 0"):
        write_language(replace(language, experts=replace(language.experts, num_shared_experts=0)))
