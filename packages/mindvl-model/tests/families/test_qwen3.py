# SPDX-License-Identifier: Apache-2.0
"""Dense Qwen3 equals Qwen3ForCausalLM of transformers for each segment."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mindvl_model import MindVLConfig
from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import smallest_config


def published_model(config: MindVLConfig) -> Qwen3ForCausalLM:
    language = config.language
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=language.vocab_size,
            hidden_size=language.hidden_size,
            intermediate_size=language.ffn_hidden_size,
            num_hidden_layers=language.num_layers,
            num_attention_heads=language.num_heads,
            num_key_value_heads=language.attention.num_kv_heads,
            head_dim=language.attention.head_dim,
            tie_word_embeddings=language.tie_embeddings,
            rms_norm_eps=language.norm_epsilon,
            max_position_embeddings=language.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": language.rope.rotary_base},
        )
    )


def copy_weights(language: Any, published: Qwen3ForCausalLM) -> None:
    """Copy weights to the transformers model, written by hand for 4 heads in 2 groups of size 8."""
    with torch.no_grad():
        published.model.embed_tokens.weight.copy_(language.embedding.word_embeddings.weight)
        for own_layer, hf_layer in zip(language.decoder.layers, published.model.layers, strict=True):
            attention = own_layer.self_attention
            hf_layer.input_layernorm.weight.copy_(own_layer.input_layernorm.weight)
            hf_layer.post_attention_layernorm.weight.copy_(own_layer.pre_mlp_layernorm.weight)
            hf_layer.self_attn.q_norm.weight.copy_(attention.q_layernorm.weight)
            hf_layer.self_attn.k_norm.weight.copy_(attention.k_layernorm.weight)
            q0, q1, k0, v0, q2, q3, k1, v1 = attention.linear_qkv.weight.split(8)
            hf_layer.self_attn.q_proj.weight.copy_(torch.cat((q0, q1, q2, q3)))
            hf_layer.self_attn.k_proj.weight.copy_(torch.cat((k0, k1)))
            hf_layer.self_attn.v_proj.weight.copy_(torch.cat((v0, v1)))
            hf_layer.self_attn.o_proj.weight.copy_(attention.linear_proj.weight)
            gate, up = own_layer.mlp.linear_fc1.weight.split(40)
            hf_layer.mlp.gate_proj.weight.copy_(gate)
            hf_layer.mlp.up_proj.weight.copy_(up)
            hf_layer.mlp.down_proj.weight.copy_(own_layer.mlp.linear_fc2.weight)
        published.model.norm.weight.copy_(language.decoder.final_layernorm.weight)
        if not published.config.tie_word_embeddings:
            published.lm_head.weight.copy_(language.output_layer.weight)


@pytest.mark.parametrize("tie_embeddings", [False, True], ids=["own head", "tied head"])
def test_logits_and_gradients_of_packed_segments_are_those_of_transformers(
    make_model: Callable[..., Any], tie_embeddings: bool
) -> None:
    config = smallest_config(tie_embeddings=tie_embeddings)
    model, published = make_model(config), published_model(config)
    copy_weights(model.language, published)
    segments = [random_segment(config, num_text=length, seed=length) for length in (7, 1, 30)]
    pack = pack_segments(segments, padding=3)

    logits = model.logits(**pack)
    expected = [published(segment.input_ids[None]).logits[0] for segment in segments]
    assert (logits[:-3] - torch.cat(expected)).abs().max() <= 1e-4

    model(**pack).backward()
    losses = [
        torch.nn.functional.cross_entropy(one, segment.labels, reduction="sum")
        for one, segment in zip(expected, segments, strict=True)
    ]
    torch.stack(losses).sum().backward()
    gradients, hf_gradients = make_model(config).language, published_model(config)
    with torch.no_grad():  # gradients as weights, so that the same hand-written copy pairs them
        for name, parameter in gradients.named_parameters():
            parameter.copy_(model.language.get_parameter(name).grad)
    copy_weights(gradients, hf_gradients)
    for name, parameter in published.named_parameters():
        assert (hf_gradients.get_parameter(name) - parameter.grad).abs().max() <= 1e-4 * parameter.grad.abs().max(), (
            name
        )


def test_rotary_angles_count_the_first_axis_only() -> None:
    from mindvl_model.language.rotary import rotary_angles

    language = smallest_config().language
    position_ids = torch.stack((torch.tensor([0, 1, 300]), torch.full((3,), 99), torch.full((3,), 99)))
    cos, sin = rotary_angles(language, position_ids)
    by_hand = torch.tensor([300 / 10000 ** (pair / 4) for pair in (0, 1, 2, 3)], dtype=torch.float64)
    torch.testing.assert_close(cos[2].double(), by_hand.cos().repeat(2), rtol=0, atol=1e-5)
    torch.testing.assert_close(sin[2].double(), by_hand.sin().repeat(2), rtol=0, atol=1e-5)
    assert torch.equal(cos[0], torch.ones(8))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"head_dim": 10, "num_key_value_heads": 1, "tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}, "num_attention_heads": 6},
    ],
    ids=["biases", "odd sizes", "YaRN"],
)
def test_keys_of_qwen3_have_the_function_that_transformers_gives_them(
    assert_published_parity: Callable[..., None], changes: dict[str, Any]
) -> None:
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "vocab_size": 64,
        "max_position_embeddings": 512,
    }
    assert_published_parity(Qwen3Config(**sizes | changes))
