# SPDX-License-Identifier: Apache-2.0
"""Qwen3 dense: pre-norm decoder, grouped-query attention with normed queries and keys, one-dimensional rotary."""

import torch
from torch import Tensor

from mindvl_model.language_config import Qwen3LanguageConfig
from mindvl_model.megatron.blocks import LanguageModel, Layout, build_language_model, transformer_config


class Qwen3Adapter:
    """LanguageAdapter of dense Qwen3."""

    def build(
        self,
        config: Qwen3LanguageConfig,
        layout: Layout,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ) -> LanguageModel:
        """The decoder, or one pipeline stage of it."""
        return build_language_model(
            transformer_config(
                layout,
                num_layers=config.num_layers,
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_heads,
                num_query_groups=config.num_kv_heads,
                kv_channels=config.head_dim,
                ffn_hidden_size=config.ffn_hidden_size,
                layernorm_epsilon=config.norm_epsilon,
                qk_layernorm=True,
                add_bias_linear=False,
            ),
            vocab_size=config.vocab_size,
            max_positions=config.max_positions,
            tie_embeddings=config.tie_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )

    def rotary_angles(self, config: Qwen3LanguageConfig, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, D]; Qwen3 counts along one axis, so the first row of position_ids [3, T] is read."""
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=position_ids.device)
        angles = position_ids[0, :, None].float() / config.rotary_base ** (exponent / config.head_dim)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()
