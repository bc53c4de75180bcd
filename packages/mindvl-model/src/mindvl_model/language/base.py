# SPDX-License-Identifier: Apache-2.0
"""The interface of a family of language models; model.py uses families through this Protocol only."""

from typing import Any, Protocol

from torch import Tensor

from mindvl_model.megatron.blocks import LanguageModel
from mindvl_model.parallel_config import BuildConfig


class LanguageAdapter(Protocol):
    """One family of language models on megatron-core."""

    def build(
        self, config: Any, build_config: BuildConfig, *, pre_process: bool, post_process: bool, vp_stage: int | None
    ) -> LanguageModel:
        """Build the decoder, or one pipeline stage of it."""
        ...

    def rotary_angles(self, config: Any, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [T, D] for position_ids [3, T] (time, height, width)."""
        ...
