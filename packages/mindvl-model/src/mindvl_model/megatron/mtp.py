# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: layers that each predict one token further, inside the segments of a packed sequence.

Runs after the decoder on the last pipeline stage. Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2). Details that the
paper does not specify follow the published weights: the input is the decoder output after its final norm, the embedding
is the first half of the input of eh_proj, and the next depth gets the output of final_layernorm.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from mindvl_model.megatron.mla import DuplicatedLinear
from mindvl_model.megatron.packing import PackedSequence
from mindvl_model.megatron.spec import RMSNorm
from mindvl_ops import Segments


class MultiTokenLayer(MegatronModule):
    """One depth: norms of both inputs, projection, transformer layer, norm. Embedding and output layer are shared."""

    def __init__(self, config: TransformerConfig, spec: ModuleSpec, depth: int, vp_stage: int | None) -> None:
        super().__init__(config=config)
        self.enorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.hnorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.eh_proj = DuplicatedLinear(config, 2 * config.hidden_size, config.hidden_size)
        # The layer adds the offset of its stage to layer_number; its number must follow that of the last decoder layer.
        number = config.num_layers + depth + 1 - get_transformer_layer_offset(config, vp_stage)
        self.transformer_layer = build_module(spec, config=config, layer_number=number, vp_stage=vp_stage)
        self.final_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor, embeddings: Tensor, pack: PackedSequence) -> Tensor:
        """Hidden states and embeddings [T/tp, 1, H] -> [T/tp, 1, H] for the output layer and the next depth."""
        if self.config.recompute_granularity == "full" and self.training:
            recomputed: Tensor = checkpoint(partial(self._forward, pack=pack), False, hidden_states, embeddings)
            return recomputed
        return self._forward(hidden_states, embeddings, pack)

    def _forward(self, hidden_states: Tensor, embeddings: Tensor, pack: PackedSequence) -> Tensor:
        joined = torch.cat((self.enorm(embeddings), self.hnorm(hidden_states)), dim=-1)
        hidden_states, _ = self.transformer_layer(self.eh_proj(joined), attention_mask=None, packed_seq_params=pack)
        normed: Tensor = self.final_layernorm(hidden_states)
        return normed


class MultiTokenPrediction(MegatronModule):
    """All depths, in `layers`, where the schedules of megatron-core expect them."""

    def __init__(self, config: TransformerConfig, spec: ModuleSpec, vp_stage: int | None) -> None:
        super().__init__(config=config)
        depths = range(config.mtp_num_layers or 0)
        self.layers = torch.nn.ModuleList(MultiTokenLayer(config, spec, depth, vp_stage) for depth in depths)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Sharded state for megatron-core checkpoints, which treat a ModuleList as not tensor-parallel."""
        state: dict[str, Any] = {}
        layers: Any = self.layers
        for depth, layer in enumerate(layers):
            state |= layer.sharded_state_dict(f"{prefix}layers.{depth}.", sharded_offsets, metadata)
        return state


def shifted(values: Tensor, segments: Segments, steps: int, fill: int) -> Tensor:
    """Shift values [T] left by `steps` tokens inside each segment; the end of a segment is filled with `fill`."""
    cu_seqlens = segments.cu_seqlens(values.device).long()
    lengths = cu_seqlens.diff()
    ends = cu_seqlens[1:].repeat_interleave(lengths, output_size=len(values))
    positions = torch.arange(steps, len(values) + steps, device=values.device)
    return torch.where(positions < ends, values[positions.clamp(max=len(values) - 1)], fill)
