# SPDX-License-Identifier: Apache-2.0
"""Properties may be combined freely: counts are those of the built decoder, and every rule finds its parameter."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mindvl_model import LanguageConfig, ModelError
from mindvl_model.counts import count_parameters
from mindvl_model.language_config import ExpertsConfig, GroupedQueryAttention, RopeConfig
from mindvl_model.parameters import named_tensors
from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3
from mindvl_model.weights.names import weight_rules

DENSE = smallest_config().language
GROUPED = GroupedQueryAttention(num_kv_heads=2, head_dim=8)
ROUTED = ExpertsConfig(num_experts=4, experts_per_token=2, expert_ffn_hidden_size=12)
LATENT = smallest_deepseek_v3().language
COMBINATIONS: dict[str, LanguageConfig] = {
    "no norms, no biases": replace(DENSE, attention=GROUPED),
    "all biases": replace(DENSE, attention=replace(GROUPED, qkv_bias=True, output_bias=True), mlp_bias=True),
    "norms and biases": replace(DENSE, attention=replace(GROUPED, qkv_bias=True, qk_norm=True)),
    "heads that are narrower than the residual stream": replace(DENSE, attention=replace(GROUPED, head_dim=4)),
    "one key head": replace(DENSE, attention=replace(GROUPED, num_kv_heads=1)),
    "M-RoPE with norms and experts": replace(
        DENSE,
        rope=RopeConfig(mrope_sections=(2, 1, 1), sections_interleaved=True),
        experts=replace(ROUTED, num_dense_layers=1, num_shared_experts=1),
    ),
    "sigmoid router without latent attention": replace(
        DENSE, experts=replace(ROUTED, router="sigmoid", num_expert_groups=2)
    ),
    "latent attention without experts": replace(LATENT, experts=None),
    "further prediction without experts": replace(DENSE, num_mtp_layers=1),
}


@pytest.mark.parametrize("language", COMBINATIONS.values(), ids=list(COMBINATIONS))
def test_any_combination_is_built_counted_and_named(make_model: Callable[..., Any], language: LanguageConfig) -> None:
    config = replace(smallest_config(), language=language)
    model = make_model(config)
    counts = count_parameters(config)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    assert counts.language + counts.mtp == sum(parameter.numel() for parameter in model.language.parameters())
    assert sorted(rule.param_name for rule in weight_rules(config)) == sorted(named_tensors(model))
    model(**pack_segments([random_segment(config, num_text=9)])).backward()
    zero = [name for name, parameter in model.language.named_parameters() if not parameter.grad.any()]
    assert zero == []


def test_pairs_are_interleaved_in_latent_attention_only() -> None:
    with pytest.raises(ModelError, match="interleaved_pairs: True is not supported with grouped_query attention"):
        replace(DENSE, rope=RopeConfig(interleaved_pairs=True))
