# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3: latent attention, dense layers, then layers with sigmoid-routed experts, and multi-token prediction.

Sources: arXiv 2412.19437; YaRN (arXiv 2309.00071) with the rounding and frequencies of transformers 5.
"""

import math

import torch
from torch import Tensor

from mindvl_model.language_config import DeepSeekV3LanguageConfig, YarnConfig
from mindvl_model.megatron.blocks import (
    BuildConfig,
    LanguageModel,
    TransformerConfig,
    build_language_model,
    expert_fields,
    transformer_config,
)
from mindvl_model.megatron.experts import ExpertLayer, ExpertTransformerLayer
from mindvl_model.megatron.mla import MLATransformerConfig, latent_attention
from mindvl_model.megatron.spec import layer_spec
from mindvl_ops import to_device


class DeepSeekV3Adapter:
    """LanguageAdapter of DeepSeek-V3."""

    def build(
        self,
        config: DeepSeekV3LanguageConfig,
        build_config: BuildConfig,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ) -> LanguageModel:
        """Build the decoder, or one pipeline stage of it."""
        attention = latent_attention(softmax_scale(config))
        dense = layer_spec(causal=True, query_key_norm=False, attention=attention)
        routed = layer_spec(
            causal=True,
            query_key_norm=False,
            attention=attention,
            experts=ExpertLayer,
            module=ExpertTransformerLayer,
        )
        num_routed = config.num_layers - config.num_dense_layers
        return build_language_model(
            _transformer(config, build_config),
            config,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            layers=[dense] * config.num_dense_layers + [routed] * num_routed,
            mtp_layer=routed if config.num_mtp_layers else None,
        )

    def rotary_angles(self, config: DeepSeekV3LanguageConfig, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [T, rope_head_dim] for position_ids[0] of [3, T], equal for both elements of a pair."""
        frequencies, factor = rotary_frequencies(config)
        angles = position_ids[0].float()[:, None] * to_device(frequencies, position_ids.device)
        angles = angles.repeat_interleave(2, dim=-1)
        return angles.cos() * factor, angles.sin() * factor


def rotary_frequencies(config: DeepSeekV3LanguageConfig) -> tuple[Tensor, float]:
    """Return the rotary frequencies [rope_head_dim / 2] in radians per token, and the factor of cosine and sine.

    YaRN keeps high frequencies, divides low frequencies by `factor`, and interpolates linearly in between.
    """
    width, base, yarn = config.rope_head_dim, config.rotary_base, config.yarn
    wavelengths = base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if yarn is None:
        return 1.0 / wavelengths, 1.0

    def pair_with(turns: float) -> float:
        return width * math.log(yarn.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with(yarn.beta_slow)), width - 1)
    stretched = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = stretched / (yarn.factor * wavelengths) + (1 - stretched) / wavelengths
    if yarn.mscale and yarn.mscale_all_dim:
        return frequencies, _magnitude(yarn, yarn.mscale) / _magnitude(yarn, yarn.mscale_all_dim)
    return frequencies, _magnitude(yarn, 1.0)


def softmax_scale(config: DeepSeekV3LanguageConfig) -> float:
    """The scale of the attention logits, which YaRN increases."""
    scale: float = (config.nope_head_dim + config.rope_head_dim) ** -0.5
    if config.yarn is not None and config.yarn.mscale_all_dim:
        scale *= _magnitude(config.yarn, config.yarn.mscale_all_dim) ** 2
    return scale


def _magnitude(yarn: YarnConfig, mscale: float) -> float:
    return 0.1 * mscale * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0


def _transformer(config: DeepSeekV3LanguageConfig, build_config: BuildConfig) -> TransformerConfig:
    return transformer_config(
        build_config,
        MLATransformerConfig,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        ffn_hidden_size=config.ffn_hidden_size,
        layernorm_epsilon=config.norm_epsilon,
        add_bias_linear=False,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_head_dim=config.nope_head_dim,
        qk_pos_emb_head_dim=config.rope_head_dim,
        v_head_dim=config.value_head_dim,
        moe_layer_freq=[0] * config.num_dense_layers + [1] * (config.num_layers - config.num_dense_layers),
        moe_router_score_function="sigmoid",
        moe_router_num_groups=config.num_expert_groups,
        moe_router_group_topk=config.groups_per_token,
        moe_router_topk_scaling_factor=config.routed_scale,
        moe_router_bias_update_rate=config.bias_update_rate,
        moe_shared_expert_intermediate_size=config.num_shared_experts * config.expert_ffn_hidden_size or None,
        mtp_num_layers=config.num_mtp_layers or None,
        mtp_loss_scaling_factor=config.mtp_loss_weight,
        **expert_fields(config, build_config.parallel),
    )
