# SPDX-License-Identifier: Apache-2.0
"""Dense Qwen2, the decoder of Qwen2.5-VL: biases of queries, keys and values, M-RoPE over time, height and width."""

from torch import Tensor

from mindvl_model.language_config import Qwen2LanguageConfig
from mindvl_model.megatron.blocks import LanguageModel, build_language_model, grouped_query_config
from mindvl_model.parallel_config import BuildConfig
from mindvl_ops import mrope_tables


class Qwen2Adapter:
    """LanguageAdapter of dense Qwen2 with M-RoPE."""

    def build(
        self,
        config: Qwen2LanguageConfig,
        build_config: BuildConfig,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ) -> LanguageModel:
        """Build the decoder, or one pipeline stage of it."""
        return build_language_model(
            grouped_query_config(config, build_config, qk_layernorm=False, add_qkv_bias=True),
            config,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )

    def rotary_angles(self, config: Qwen2LanguageConfig, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [T, D] for position_ids [3, T] (time, height, width)."""
        return mrope_tables(position_ids, config.head_dim, config.rotary_base, config.mrope_sections)
