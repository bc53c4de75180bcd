# SPDX-License-Identifier: Apache-2.0
"""The MLP projector: each block of neighbouring patches becomes one visual token of the language model's width.

Comes after the vision encoder, before the language model. The merger of Qwen2.5-VL, random at the start (paper, 5.1).
"""

import torch.nn.functional as F
from torch import Tensor

from mindvl_model.config import VisionConfig
from mindvl_model.megatron.blocks import MegatronModule, RMSNorm, build_mlp_pair, transformer_config
from mindvl_model.parallel_config import BuildConfig


class Projector(MegatronModule):
    """RMS norm, then a two-layer MLP over merge blocks."""

    def __init__(self, vision: VisionConfig, output_size: int, build_config: BuildConfig) -> None:
        config = transformer_config(
            build_config.for_vision,
            num_layers=1,
            hidden_size=vision.hidden_size,
            num_attention_heads=build_config.for_vision.parallel.tp_size,  # there are none; megatron-core wants them split
            sequence_parallel=False,
        )
        super().__init__(config=config)
        self.block_size = vision.hidden_size * vision.spatial_merge_size**2
        self.norm = RMSNorm(config, vision.hidden_size, eps=vision.norm_epsilon)
        self.fc1, self.fc2 = build_mlp_pair(build_config, self.block_size, self.block_size, output_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Visual tokens [G, H_text] from patches [P, H], four neighbours after each other."""
        blocks = self.norm(hidden_states).view(-1, self.block_size)  # [G, merge^2*H]
        return self.fc2(F.gelu(self.fc1(blocks)[0]))[0]
