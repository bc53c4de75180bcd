# SPDX-License-Identifier: Apache-2.0
"""Rules of the families with experts cover all parameters with the published names and are exact both ways."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mindvl_model import WeightError
from mindvl_model.parameters import named_tensors
from mindvl_model.testing.tiny import smallest_deepseek_v3, smallest_llama, smallest_qwen3_moe
from mindvl_model.weights.decoder import _all_experts
from mindvl_model.weights.names import weight_rules

CONFIGS = [
    smallest_llama(attention_bias=True, mlp_bias=True),
    smallest_qwen3_moe(),
    smallest_qwen3_moe(tie_embeddings=True),
    smallest_deepseek_v3(),
    smallest_deepseek_v3(q_lora_rank=None),
    smallest_deepseek_v3(num_mtp_layers=2, num_shared_experts=0),
]


@pytest.mark.parametrize(
    "config", CONFIGS, ids=["llama", "qwen3_moe", "tied", "deepseek_v3", "whole queries", "two depths"]
)
def test_rules_cover_every_parameter_and_bias_and_go_both_ways_exactly(
    make_model: Callable[..., Any], config: Any
) -> None:
    tensors = named_tensors(make_model(config))
    rules = weight_rules(config)
    assert sorted(rule.param_name for rule in rules) == sorted(tensors)
    names = [name for rule in rules for name in rule.hf_names]
    assert len(set(names)) == len(names)
    for rule in rules:
        pieces = rule.split(tensors[rule.param_name].detach())
        assert len(pieces) == len(rule.hf_names)
        assert all(piece.is_contiguous() for piece in pieces)
        assert torch.equal(rule.join(pieces), tensors[rule.param_name]), rule.param_name


def test_names_are_those_of_the_published_deepseek_v3() -> None:
    """Tensors of one layer of each kind, from the index of deepseek-ai/DeepSeek-V3 (layer 61 there is 3 here)."""
    config = smallest_deepseek_v3()
    names = {name for rule in weight_rules(config) for name in rule.hf_names}
    prefix = "model.language_model.layers."
    attention = ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
    dense = [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    routed = [
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
        *(f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")),
        *(f"mlp.experts.{expert}.{part}_proj.weight" for expert in range(8) for part in ("gate", "up", "down")),
    ]
    block = ["input_layernorm.weight", "post_attention_layernorm.weight", *(f"self_attn.{n}.weight" for n in attention)]
    further = ["embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"]
    expected = {"0": block + dense, "2": block + routed, "3": block + routed + [f"{n}.weight" for n in further]}
    for layer, parts in expected.items():
        found = {name for name in names if name.startswith(f"{prefix}{layer}.")}
        assert found == {f"{prefix}{layer}.{part}" for part in parts}


def test_an_expert_is_transposed_and_its_gate_precedes_its_up_projection() -> None:
    rules = {rule.param_name: rule for rule in weight_rules(smallest_qwen3_moe(num_experts=2))}
    rule = rules["language.decoder.layers.0.mlp.experts.linear_fc1.weight"]
    assert [name.split("experts.")[1] for name in rule.hf_names[:3]] == [
        "0.gate_proj.weight",
        "0.up_proj.weight",
        "1.gate_proj.weight",
    ]
    tensors = [torch.full((12, 24), float(number)) for number in range(4)]
    joined = rule.join(tensors)
    assert joined.shape == (2, 24, 24)
    assert joined[1, 5].tolist() == [2.0] * 12 + [3.0] * 12


def test_copies_of_one_parameter_that_differ_are_refused_by_name() -> None:
    rule = next(rule for rule in weight_rules(smallest_deepseek_v3()) if "embedding" in rule.param_name)
    tensor = torch.ones(64, 24)
    assert rule.join([tensor, tensor.clone()]) is tensor
    with pytest.raises(WeightError, match=r"layers\.3\.embed_tokens\.weight: must equal .*model\.embed_tokens"):
        rule.join([tensor, tensor + 1])


def test_four_query_heads_of_one_group_are_split_from_their_key_and_value() -> None:
    name = "language.decoder.layers.0.self_attention.linear_qkv.weight"
    config = smallest_llama(num_kv_heads=1)
    rule = next(rule for rule in weight_rules(config) if rule.param_name == name)
    size = config.language.attention.rotary_width
    joined = torch.arange(6 * size)[:, None]
    query, key, value = rule.split(joined)
    assert torch.equal(query, joined[: 4 * size])
    assert torch.equal(key, joined[4 * size : 5 * size])
    assert torch.equal(value, joined[5 * size :])


def test_square_experts_in_one_tensor_are_stored_as_transformers_saves_them() -> None:
    rule = _all_experts("experts", "experts", 4, 4)
    stored = torch.arange(32).view(2, 4, 4)
    assert torch.equal(rule.join([stored]), stored.transpose(1, 2))
    assert torch.equal(rule.split(rule.join([stored]))[0], stored)
