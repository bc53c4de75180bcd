# SPDX-License-Identifier: Apache-2.0
"""Build a decoder, or one pipeline stage of it, on megatron-core from its properties.

Comes after language_config.py; model.py calls it. The blocks are those of megatron/.
"""

from functools import partial
from typing import Any

from mindvl_model.language.rotary import softmax_scale
from mindvl_model.language_config import ExpertsConfig, LanguageConfig
from mindvl_model.megatron.blocks import (
    BuildConfig,
    LanguageModel,
    TransformerConfig,
    build_language_model,
    transformer_config,
)
from mindvl_model.megatron.expert_messages import ExpertMessages
from mindvl_model.megatron.experts import ExpertLayer, ExpertTransformerLayer, connect_experts
from mindvl_model.megatron.mla import MLATransformerConfig, latent_attention
from mindvl_model.megatron.spec import layer_spec
from mindvl_model.parallel_config import even_rows, expert_blocks


def build_decoder(
    config: LanguageConfig, build_config: BuildConfig, *, pre_process: bool, post_process: bool, vp_stage: int | None
) -> LanguageModel:
    """Build the decoder, or one pipeline stage of it.

    Args:
        config: Properties of the decoder.
        build_config: Parallel layout, recomputation and data type.
        pre_process: Whether this is the first stage.
        post_process: Whether this is the last stage.
        vp_stage: Index of the virtual pipeline stage; None without virtual stages.
    """
    attention = config.attention
    layer = partial(
        layer_spec,
        causal=True,
        query_key_norm=attention.kind == "grouped_query" and attention.qk_norm,
        attention=latent_attention(softmax_scale(config, attention), attention.latent_norm_epsilon)
        if attention.kind == "latent"
        else None,
        output_bias=attention.kind == "grouped_query" and attention.output_bias,
    )
    dense = layer(mlp_bias=config.mlp_bias)
    last = dense if config.experts is None else layer(experts=ExpertLayer, module=ExpertTransformerLayer)
    model = build_language_model(
        _transformer(config, build_config),
        config,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        layers=[dense] * config.num_dense_layers + [last] * (config.num_layers - config.num_dense_layers),
        mtp_layer=last if config.num_mtp_layers else None,
    )
    parallel, seq_length = build_config.parallel, build_config.seq_length
    if config.experts is not None and parallel.ep_size > 1:
        even = None if seq_length is None else even_rows(config.experts, parallel, seq_length)
        blocks = expert_blocks(config.experts, parallel, seq_length)
        model.expert_messages = ExpertMessages(config.experts.num_experts, parallel.ep_size, even, blocks)
        connect_experts(model, model.expert_messages)
    return model


def _transformer(config: LanguageConfig, build_config: BuildConfig) -> TransformerConfig:
    attention, experts = config.attention, config.experts
    given: dict[str, Any] = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "ffn_hidden_size": config.ffn_hidden_size,
        "layernorm_epsilon": config.norm_epsilon,
        "add_bias_linear": False,  # the specs of layers add the biases, because MLP and attention differ
        "mtp_num_layers": config.num_mtp_layers or None,
        "mtp_loss_scaling_factor": config.mtp_loss_weight,
    }
    kind = TransformerConfig
    if attention.kind == "latent":
        kind = MLATransformerConfig
        given |= {
            "q_lora_rank": attention.q_lora_rank,
            "kv_lora_rank": attention.kv_lora_rank,
            "qk_head_dim": attention.nope_head_dim,
            "qk_pos_emb_head_dim": attention.rope_head_dim,
            "v_head_dim": attention.value_head_dim,
        }
    else:
        given |= {
            "num_query_groups": attention.num_kv_heads,
            "kv_channels": attention.head_dim,
            "qk_layernorm": attention.qk_norm,
            "add_qkv_bias": attention.qkv_bias,
        }
    if experts is None:
        return transformer_config(build_config, kind, **given)
    transformer = transformer_config(
        build_config, kind, **given, **_expert_fields(experts, config.num_layers, build_config)
    )
    transformer.moe_router_pre_softmax = experts.router == "softmax" and not experts.normalize_router
    return transformer


def _expert_fields(experts: ExpertsConfig, num_layers: int, build_config: BuildConfig) -> dict[str, Any]:
    has_groups = experts.num_expert_groups > 1 or experts.router == "sigmoid"
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.experts_per_token,
        "moe_ffn_hidden_size": experts.expert_ffn_hidden_size,
        "moe_layer_freq": [0] * experts.num_dense_layers + [1] * (num_layers - experts.num_dense_layers),
        "moe_shared_expert_intermediate_size": experts.num_shared_experts * experts.expert_ffn_hidden_size or None,
        "moe_router_score_function": experts.router,
        # megatron-core rejects softmax over a single selected expert; Router supports it, as transformers does
        "moe_router_pre_softmax": experts.router == "softmax" and experts.experts_per_token == 1,
        "moe_router_num_groups": experts.num_expert_groups if has_groups else None,
        "moe_router_group_topk": experts.groups_per_token if has_groups else None,
        "moe_router_topk_scaling_factor": experts.routed_scale if experts.routed_scale != 1 else None,
        "moe_router_bias_update_rate": experts.bias_update_rate,
        "moe_aux_loss_coeff": experts.aux_loss_weight,
        "moe_token_dispatcher_type": "alltoall",  # matches ExpertLayer; read by the schedules of megatron-core
        "moe_router_dtype": "fp32",
        "expert_model_parallel_size": build_config.parallel.ep_size,
        "expert_tensor_parallel_size": 1,
    }
