# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: the attention of dense Qwen3, and experts with a softmax router in every layer."""

from torch import Tensor

from mindvl_model.language_config import Qwen3MoELanguageConfig
from mindvl_model.megatron.blocks import (
    BuildConfig,
    LanguageModel,
    build_language_model,
    expert_fields,
    grouped_query_config,
)
from mindvl_model.megatron.experts import ExpertLayer, ExpertTransformerLayer
from mindvl_model.megatron.spec import layer_spec
from mindvl_ops import rotary_tables


class Qwen3MoEAdapter:
    """LanguageAdapter of Qwen3-MoE."""

    def build(
        self,
        config: Qwen3MoELanguageConfig,
        build_config: BuildConfig,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ) -> LanguageModel:
        """Build the decoder, or one pipeline stage of it."""
        transformer = grouped_query_config(
            config,
            build_config,
            qk_layernorm=True,
            moe_router_score_function="softmax",
            # megatron-core rejects softmax over a single selected expert; Router supports it, as transformers does
            moe_router_pre_softmax=not config.normalize_router or config.experts_per_token == 1,
            moe_aux_loss_coeff=config.aux_loss_weight,
            **expert_fields(config, build_config.parallel),
        )
        transformer.moe_router_pre_softmax = not config.normalize_router
        layer = layer_spec(causal=True, query_key_norm=True, experts=ExpertLayer, module=ExpertTransformerLayer)
        return build_language_model(
            transformer,
            config,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            layers=[layer] * config.num_layers,
        )

    def rotary_angles(self, config: Qwen3MoELanguageConfig, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [T, D]; positions have one axis, so only position_ids[0] of [3, T] is used."""
        return rotary_tables(position_ids[0], config.head_dim, config.rotary_base)
