# SPDX-License-Identifier: Apache-2.0
"""The MLP projector, which maps each block of neighbouring patches to one visual token of the language model.

It has the architecture of the merger of the vision encoder, and is initialized randomly if the language model is another
one (paper, section 5.1).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mindvl_model.config import VisionConfig
from mindvl_model.megatron.blocks import VISION_NORMS, MegatronModule, build_mlp_pair, transformer_config
from mindvl_model.parallel_config import BuildConfig


class Merger(MegatronModule):
    """A norm, then a two-layer MLP over merge blocks.

    Args:
        norm_blocks: Normalize merge blocks instead of patches.
    """

    def __init__(
        self, vision: VisionConfig, output_size: int, build_config: BuildConfig, *, norm_blocks: bool = False
    ) -> None:
        config = transformer_config(
            build_config.for_vision,
            num_layers=1,
            hidden_size=vision.hidden_size,
            num_attention_heads=build_config.for_vision.parallel.tp_size,  # unused, but must be a multiple of tp_size
            sequence_parallel=False,
        )
        super().__init__(config=config)
        self.block_size = vision.hidden_size * vision.spatial_merge_size**2
        self.norm_size = self.block_size if norm_blocks else vision.hidden_size
        self.norm = VISION_NORMS[vision.entry.norm](config, self.norm_size, eps=vision.norm_epsilon)
        self.fc1, self.fc2 = build_mlp_pair(build_config, self.block_size, self.block_size, output_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Patches [P, H], the neighbours of a merge block adjacent -> visual tokens [G, H of the language model]."""
        blocks = self.norm(hidden_states.reshape(-1, self.norm_size)).view(-1, self.block_size)  # [G, merge^2*H]
        return self.fc2(F.gelu(self.fc1(blocks)[0]))[0]


class Projector(Merger):
    """The merger of the last layer, and one of each deepstack layer."""

    def __init__(self, vision: VisionConfig, output_size: int, build_config: BuildConfig) -> None:
        super().__init__(vision, output_size, build_config)
        self.deepstack = _Mergers(vision, output_size, build_config) if vision.deepstack_layers else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Output of the vision encoder [P, (1 + D)*H] -> visual tokens and deepstack features [G, (1 + D)*H of the LM]."""
        if self.deepstack is None:
            return super().forward(hidden_states)
        last, *further = hidden_states.chunk(1 + self.deepstack.count, dim=-1)
        return torch.cat((super().forward(last), *self.deepstack(further)), dim=-1)


class _Mergers(MegatronModule):
    """Named by their number; a ModuleList would store the shards of tensor-parallel ranks as whole tensors."""

    def __init__(self, vision: VisionConfig, output_size: int, build_config: BuildConfig) -> None:
        count = len(vision.deepstack_layers)
        mergers = [Merger(vision, output_size, build_config, norm_blocks=True) for _ in range(count)]
        super().__init__(config=mergers[0].config)
        # Outputs are in the order of the layers; the mergers have the order of the configuration.
        self.numbers = sorted(range(count), key=lambda number: vision.deepstack_layers[number])
        self.count = count
        for number, merger in enumerate(mergers):
            self.add_module(str(number), merger)

    def forward(self, outputs: list[Tensor]) -> list[Tensor]:
        return [self.get_submodule(str(number))(one) for number, one in zip(self.numbers, outputs, strict=True)]
