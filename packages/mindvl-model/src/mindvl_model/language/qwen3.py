# SPDX-License-Identifier: Apache-2.0
"""Dense Qwen3: pre-norm decoder, grouped-query attention with normalized queries and keys, one-dimensional rotary."""

from torch import Tensor

from mindvl_model.language_config import Qwen3LanguageConfig
from mindvl_model.megatron.blocks import LanguageModel, build_language_model, grouped_query_config
from mindvl_model.parallel_config import BuildConfig
from mindvl_ops import rotary_tables


class Qwen3Adapter:
    """LanguageAdapter of dense Qwen3."""

    def build(
        self,
        config: Qwen3LanguageConfig,
        build_config: BuildConfig,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ) -> LanguageModel:
        """Build the decoder, or one pipeline stage of it."""
        return build_language_model(
            grouped_query_config(config, build_config, qk_layernorm=True),
            config,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )

    def rotary_angles(self, config: Qwen3LanguageConfig, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [T, D]; positions have one axis, so only position_ids[0] of [3, T] is used."""
        return rotary_tables(position_ids[0], config.head_dim, config.rotary_base)
