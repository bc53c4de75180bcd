# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention with decoupled rotary embedding, as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.1).

Replaces self attention in a megatron-core layer, because the module of megatron-core drops parts of gradients under
tensor parallelism. Here each rank computes the down-projections of its slice of the pack, so that their gradients are
sums over ranks, and the rotary part of the key, which all heads share, is gathered with a summing backward pass.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

import mindvl_ops as ops
from mindvl_model.megatron.packing import PackedSequence
from mindvl_model.megatron.spec import PackedAttention, RMSNorm

__all__ = ["DuplicatedLinear", "LatentAttention", "MLATransformerConfig", "latent_attention"]


class DuplicatedLinear(torch.nn.Module):
    """A linear layer without bias, replicated on tensor-parallel ranks and applied to each rank's slice of the pack."""

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._forward_impl = torch.nn.functional.linear  # named as in layers of megatron-core; quantized.py replaces it

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self._forward_impl(hidden_states, self.weight)


class LatentAttention(MegatronModule):
    """Causal attention with keys and values projected from one low-rank vector per token."""

    config: MLATransformerConfig

    def __init__(
        self, config: MLATransformerConfig, layer_number: int, softmax_scale: float, norm_epsilon: float, **_: Any
    ) -> None:
        super().__init__(config=config)
        heads, self.nope, self.rope = config.num_attention_heads, config.qk_head_dim, config.qk_pos_emb_head_dim
        self.value, self.latent = config.v_head_dim, config.kv_lora_rank
        queries = heads * (self.nope + self.rope)
        if config.q_lora_rank is None:
            self.linear_q_proj = _split_columns(config, config.hidden_size, queries)
        else:
            self.linear_q_down_proj = DuplicatedLinear(config, config.hidden_size, config.q_lora_rank)
            self.q_layernorm = RMSNorm(config, config.q_lora_rank, norm_epsilon)
            self.linear_q_up_proj = _split_columns(config, config.q_lora_rank, queries)
        self.linear_kv_down_proj = DuplicatedLinear(config, config.hidden_size, self.latent + self.rope)
        self.kv_layernorm = RMSNorm(config, self.latent, norm_epsilon)
        self.linear_kv_up_proj = _split_columns(config, self.latent, heads * (self.nope + self.value))
        self.core_attention = PackedAttention(config, layer_number, AttnMaskType.causal, "self", softmax_scale)
        self.linear_proj = RowParallelLinear(
            heads * self.value,
            config.hidden_size,
            config=config,
            init_method=_keep,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
        )

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, None]:
        """[T/tp, 1, H] -> [T/tp, 1, H], and None for the bias."""
        pack: PackedSequence = kwargs["packed_seq_params"]
        assert pack.cos is not None
        assert pack.sin is not None
        if self.config.q_lora_rank is None:
            query = self.linear_q_proj(hidden_states)[0]
        else:
            query = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))[0]
        query = query.view(query.shape[0], -1, self.nope + self.rope)  # [T, N/tp, nope + rope]
        query_nope, query_rope = query.split((self.nope, self.rope), dim=-1)
        latent, key_rope = self.linear_kv_down_proj(hidden_states).split((self.latent, self.rope), dim=-1)
        if self.config.sequence_parallel:
            key_rope = gather_from_sequence_parallel_region(key_rope)  # [T, 1, rope], for every head
        key_value = self.linear_kv_up_proj(self.kv_layernorm(latent))[0]
        key_value = key_value.view(key_value.shape[0], -1, self.nope + self.value)  # [T, N/tp, nope + value]
        key_nope, value = key_value.split((self.nope, self.value), dim=-1)
        # Published weights turn neighbours; transformers sorts them into halves, which leaves the scores the same.
        query_rope = ops.rotary(query_rope, pack.cos, pack.sin, interleaved=True)
        key_rope = ops.rotary(key_rope, pack.cos, pack.sin, interleaved=True).expand(-1, query.shape[1], -1)
        context = self.core_attention(
            torch.cat((query_nope, query_rope), dim=-1).unsqueeze(1),
            torch.cat((key_nope, key_rope), dim=-1).unsqueeze(1),
            value.unsqueeze(1),
            attention_mask,
            packed_seq_params=pack,
        )
        return self.linear_proj(context)[0], None


def latent_attention(softmax_scale: float, norm_epsilon: float) -> ModuleSpec:
    """The ModuleSpec of LatentAttention, for layer_spec."""
    return ModuleSpec(module=LatentAttention, params={"softmax_scale": softmax_scale, "norm_epsilon": norm_epsilon})


def _keep(weight: Tensor) -> Tensor:
    return weight


def _split_columns(config: TransformerConfig, input_size: int, output_size: int) -> ColumnParallelLinear:
    """A linear layer that splits heads over tensor-parallel ranks and gathers its input first."""
    return ColumnParallelLinear(
        input_size, output_size, config=config, init_method=_keep, bias=False, gather_output=False
    )
