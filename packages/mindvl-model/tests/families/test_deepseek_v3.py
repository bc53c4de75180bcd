# SPDX-License-Identifier: Apache-2.0
"""The DeepSeek-V3 adapter equals DeepseekV3ForCausalLM and MtpModel of transformers for each segment."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import MtpModel

from mindvl_model.language_config import YarnConfig
from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import smallest_deepseek_v3

Make = Callable[..., Any]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"yarn": None},
        {"q_lora_rank": None, "norm_epsilon": 1e-3},
        {"num_shared_experts": 2, "experts_per_token": 3, "rope_head_dim": 4, "num_dense_layers": 2},
    ],
    ids=["yarn", "plain rotary", "whole queries", "other sizes"],
)
def test_logits_and_gradients_of_packed_segments_are_those_of_transformers(
    assert_segment_parity: Make, changes: dict[str, Any]
) -> None:
    assert_segment_parity(smallest_deepseek_v3(**changes | {"num_mtp_layers": 0}))


@pytest.mark.parametrize("seed", [0, 1])
def test_bf16_logits_stay_within_the_bound_of_the_paper(
    make_model: Make, publish: Make, near_in_bf16: Make, seed: int
) -> None:
    config = smallest_deepseek_v3()
    model = make_model(config, dtype=torch.bfloat16)
    near_in_bf16(model, publish(model, torch.bfloat16), random_segment(config, num_text=40, seed=seed))


def multi_token_model(model: Any, published: Any, take: Callable[[Tensor], Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """The MTP layers of transformers, and the result of `take` for each parameter of MindVLModel under their names."""
    depths = model.mindvl.language.num_mtp_layers
    hf_model = MtpModel(published, depths).train()
    parts: dict[str, Tensor] = {}
    for depth, layer in enumerate(model.language.mtp.layers):
        block, prefix = layer.transformer_layer, f"layers.{depth}."
        attention, experts, shared = block.self_attention, block.mlp.experts, block.mlp.shared_experts
        gate, up = take(shared.linear_fc1.weight).chunk(2)
        names = {
            "enorm": take(layer.enorm.weight),
            "hnorm": take(layer.hnorm.weight),
            "eh_proj": take(layer.eh_proj.weight),
            "post_norm": take(layer.final_layernorm.weight),
            "mtp_block.input_layernorm": take(block.input_layernorm.weight),
            "mtp_block.post_attention_layernorm": take(block.pre_mlp_layernorm.weight),
            "mtp_block.self_attn.q_a_proj": take(attention.linear_q_down_proj.weight),
            "mtp_block.self_attn.q_a_layernorm": take(attention.q_layernorm.weight),
            "mtp_block.self_attn.q_b_proj": take(attention.linear_q_up_proj.weight),
            "mtp_block.self_attn.kv_a_proj_with_mqa": take(attention.linear_kv_down_proj.weight),
            "mtp_block.self_attn.kv_a_layernorm": take(attention.kv_layernorm.weight),
            "mtp_block.self_attn.kv_b_proj": take(attention.linear_kv_up_proj.weight),
            "mtp_block.self_attn.o_proj": take(attention.linear_proj.weight),
            "mtp_block.mlp.gate": take(block.mlp.router.weight),
            "mtp_block.mlp.shared_experts.gate_proj": gate,
            "mtp_block.mlp.shared_experts.up_proj": up,
            "mtp_block.mlp.shared_experts.down_proj": take(shared.linear_fc2.weight),
        }
        parts |= {f"{prefix}{name}.weight": tensor for name, tensor in names.items()}
        parts[f"{prefix}mtp_block.mlp.experts.gate_up_proj"] = take(experts.linear_fc1.weight).transpose(1, 2)
        parts[f"{prefix}mtp_block.mlp.experts.down_proj"] = take(experts.linear_fc2.weight).transpose(1, 2)
    return hf_model, parts


@pytest.mark.parametrize("num_mtp_layers", [1, 2])
def test_multi_token_prediction_is_that_of_transformers_and_stays_inside_segments(
    make_model: Make, publish: Make, published_gradients: Make, losses: Make, num_mtp_layers: int
) -> None:
    config = smallest_deepseek_v3(num_mtp_layers=num_mtp_layers)
    model = make_model(config)
    published = publish(model)
    hf_model, weights = multi_token_model(model, published, lambda parameter: parameter.detach())
    biases = {
        f"layers.{depth}.mtp_block.mlp.gate.e_score_correction_bias": layer.transformer_layer.mlp.router.expert_bias
        for depth, layer in enumerate(model.language.mtp.layers)
    }
    missing, unexpected = hf_model.load_state_dict(weights | biases, strict=False)
    assert not unexpected
    assert {name.split(".")[0] for name in missing} <= {"embed_tokens", "shared_head"}
    segments = [random_segment(config, num_text=length, seed=length) for length in (7, 1, 30)]
    pack = pack_segments(segments)
    model.take_mtp_loss()
    model(**pack).backward()

    total, deeper = torch.zeros(()), torch.zeros(num_mtp_layers)
    for segment in segments:
        hidden = published.model(segment.input_ids[None]).last_hidden_state
        total = total + losses([published.lm_head(hidden)[0]], [segment.labels])
        for depth in range(min(num_mtp_layers, len(segment.input_ids) - 1)):
            steps = depth + 1
            hidden = hf_model.forward_layer(
                depth,
                hidden[:, : len(segment.input_ids) - steps],
                torch.arange(len(segment.input_ids) - steps)[None],
                None,
                input_ids=segment.input_ids[None, steps:],
            )
            loss = losses([published.lm_head(hidden)[0]], [segment.labels[steps:]])
            deeper[depth] += loss.detach()
            total = total + 0.3 / num_mtp_layers * loss
    total.backward()
    tally = model.take_mtp_loss()
    torch.testing.assert_close(tally[:, 0], deeper, rtol=1e-5, atol=0)

    _, gradients = multi_token_model(model, published, lambda parameter: parameter.grad)
    for name, gradient in gradients.items():
        expected = hf_model.get_parameter(name).grad
        assert (gradient - expected).abs().max() <= 1e-4 * expected.abs().max(), name
    without = replace(config, language=replace(config.language, num_mtp_layers=0))
    for name, expected in published_gradients(published, without).items():
        if not name.endswith("expert_bias"):
            gradient = model.get_parameter(name).grad
            assert (gradient - expected).abs().max() <= 1e-4 * expected.abs().max(), name


def test_rotary_frequencies_follow_yarn_by_hand() -> None:
    """Factor 4, original length 128, width 8, base 10000: frequencies are divided by 4 from pair 2 on."""
    from mindvl_model.language.rotary import rotary_frequencies, softmax_scale

    language = smallest_deepseek_v3().language
    assert language.attention.kind == "latent"
    frequencies, factor = rotary_frequencies(language)
    # pair_with(1 turn) = 8 * ln(128 / 2 pi) / (2 ln 10000) = 1.31, rounded up to 2; pair_with(32 turns) lies below 0.
    plain = torch.tensor([1.0, 0.1, 0.01, 0.001])
    torch.testing.assert_close(frequencies, plain * torch.tensor([1.0, (1 + 0.25) / 2, 0.25, 0.25]))
    assert factor == pytest.approx((1 + 0.1 * 1.3862944) / (1 + 0.07 * 1.3862944))
    assert softmax_scale(language, language.attention) == pytest.approx(16**-0.5 * (1 + 0.07 * 1.3862944) ** 2)
    shorter = replace(language, rope=replace(language.rope, scaling=YarnConfig(factor=1.0)))
    assert softmax_scale(shorter, shorter.attention) == 0.25
