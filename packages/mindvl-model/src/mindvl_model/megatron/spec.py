# SPDX-License-Identifier: Apache-2.0
"""The ModuleSpec of transformer layers with the operators of mindvl_ops, for vision encoder and language model.

PackedAttention is the common attention patch of the paper (section 3.1.4): vision and language differ only in their
segments and in causal masking.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mindvl_ops as ops
from mindvl_model.megatron.heads import to_own_slice, to_whole_pack
from mindvl_model.megatron.packing import PackedSequence
from mindvl_ops import Segments


class RMSNorm(torch.nn.Module):
    """RMS norm over the last dimension; with sequence parallelism its gradient is summed over the ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.epsilon = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states, self.weight, self.epsilon)


class SwiGLU(MegatronModule):
    """SwiGLU activation of a gated MLP."""

    def forward(self, gate_and_up: Tensor) -> Tensor:
        return ops.swiglu(gate_and_up)


class PackedAttention(MegatronModule):
    """Attention inside the segments of a packed sequence: causal for language, full or windowed for vision."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        is_split = config.context_parallel_size > 1
        self.cp_group = parallel_state.get_context_parallel_group() if is_split else None
        self.layer_number = layer_number
        self.causal = attn_mask_type == AttnMaskType.causal
        self.scale = softmax_scale
        # Recomputed here, because the recomputation of megatron-core does not cover LatentAttention. Covers the
        # attention operator but not the all-to-all of context parallelism.
        self.recomputes = config.recompute_granularity == "selective"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequence | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None
        segments = packed_seq_params.of_layer(self.layer_number)
        # [T/cp, 1, N, D] -> [T/cp, N, D]; axis 1 is the batch of megatron-core, and a packed sequence is a batch of 1.
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if self.cp_group is not None:
            query, key, value = to_whole_pack(query, key, value, self.cp_group)
        if self.recomputes and self.training:
            context = checkpoint(
                self._attend, query, key, value, segments, use_reentrant=False, preserve_rng_state=False
            )
        else:
            context = self._attend(query, key, value, segments)
        if self.cp_group is not None:
            context = to_own_slice(context, self.cp_group)
        return context.reshape(context.shape[0], 1, -1)  # [T/cp, 1, N*D]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        return ops.attention(query, key, value, segments, causal=self.causal, scale=self.scale)


class PackedSelfAttention(SelfAttention):
    """Self attention of megatron-core that applies the rotary angles of the packed sequence."""

    _pack: PackedSequence

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._pack = kwargs["packed_seq_params"]
        return super().forward(hidden_states, attention_mask, **kwargs)

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        cos, sin = self._pack.cos, self._pack.sin
        assert cos is not None
        assert sin is not None
        query = ops.rotary(query.squeeze(1), cos, sin).unsqueeze(1)
        key = ops.rotary(key.squeeze(1), cos, sin).unsqueeze(1)
        return query, key, value


def layer_spec(
    *,
    causal: bool,
    query_key_norm: bool,
    attention: ModuleSpec | None = None,
    experts: type[MegatronModule] | None = None,
    module: type[TransformerLayer] = TransformerLayer,
) -> ModuleSpec:
    """Build the spec of a pre-norm transformer layer.

    Args:
        causal: Use a causal mask.
        query_key_norm: Normalize queries and keys.
        attention: Replaces the default attention, in which case the first two arguments have no effect.
        experts: Replaces the dense MLP.
        module: Class of the layer.
    """
    mask = AttnMaskType.causal if causal else AttnMaskType.no_mask
    head_norm = RMSNorm if query_key_norm else IdentityOp
    default_attention = ModuleSpec(
        module=PackedSelfAttention,
        params={"attn_mask_type": mask},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    dense_mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=SwiGLU),
    )
    return ModuleSpec(
        module=module,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention or default_attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=experts or dense_mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
