# SPDX-License-Identifier: Apache-2.0
"""The MLP projector, which maps each block of neighbouring patches to one visual token of the language model.

It has the architecture of the merger of Qwen2.5-VL and is initialized randomly (paper, section 5.1).
"""

import torch.nn.functional as F
from torch import Tensor

from mindvl_model.config import VisionConfig
from mindvl_model.megatron.blocks import MegatronModule, RMSNorm, build_mlp_pair, transformer_config
from mindvl_model.parallel_config import BuildConfig


class Projector(MegatronModule):
    """RMS norm over patches, then a two-layer MLP over merge blocks."""

    def __init__(self, vision: VisionConfig, output_size: int, build_config: BuildConfig) -> None:
        config = transformer_config(
            build_config.for_vision,
            num_layers=1,
            hidden_size=vision.hidden_size,
            num_attention_heads=build_config.for_vision.parallel.tp_size,  # unused, but must be a multiple of tp_size
            sequence_parallel=False,
        )
        super().__init__(config=config)
        self.block_size = vision.hidden_size * vision.spatial_merge_size**2
        self.norm = RMSNorm(config, vision.hidden_size, eps=vision.norm_epsilon)
        self.fc1, self.fc2 = build_mlp_pair(build_config, self.block_size, self.block_size, output_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Patches [P, H], the four neighbours of a merge block adjacent -> visual tokens [G, H of the language model]."""
        blocks = self.norm(hidden_states).view(-1, self.block_size)  # [G, merge^2*H]
        return self.fc2(F.gelu(self.fc1(blocks)[0]))[0]
