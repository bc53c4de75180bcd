# SPDX-License-Identifier: Apache-2.0
"""The ModuleSpec of transformer layers with the operators of mindvl_ops, for vision encoder and language model.

PackedAttention is the common attention patch of the paper (section 3.1.4): vision and language differ only in their
segments and in causal masking.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
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

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        """Return the norm of the hidden states [T, 1, H]; with a residual the norm of their sum, and the sum."""
        if residual is None:
            return ops.rms_norm(hidden_states, self.weight, self.epsilon)
        return ops.add_rms_norm(hidden_states, residual, self.weight, self.epsilon)


class LayerNorm(RMSNorm):
    """Layer norm with a bias over the last dimension, with the calls of RMSNorm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        """Return the norm of the hidden states [T, 1, H]; with a residual the norm of their sum, and the sum."""
        total = hidden_states if residual is None else hidden_states + residual
        normed = F.layer_norm(total, self.weight.shape, self.weight, self.bias, self.epsilon)
        return normed if residual is None else (normed, total)


class HeadNorm(RMSNorm):
    """RMS norm of query or key heads, which is part of the operator that splits and rotates them.

    Without heads the call returns the weight. It goes through the module, because forward pre-hooks of megatron-core wait
    for the parameters of the module that is called.
    """

    def forward(self, hidden_states: Tensor | None = None, residual: Tensor | None = None) -> Any:
        return self.weight if hidden_states is None else super().forward(hidden_states)


class BiasedColumns(ColumnParallelLinear):
    """A column-parallel linear layer with bias, where add_bias_linear is off because other layers have none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"bias": True})


class BiasedRows(RowParallelLinear):
    """A row-parallel linear layer with bias, where add_bias_linear is off because other layers have none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"bias": True})


class SwiGLU(MegatronModule):
    """SwiGLU activation of a gated MLP."""

    def forward(self, gate_and_up: Tensor) -> Tensor:
        return ops.swiglu(gate_and_up)


class GeluTanh(MegatronModule):
    """GELU of an MLP without a gate, in its approximation by the hyperbolic tangent."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.gelu(hidden_states, approximate="tanh")


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

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[T/tp, 1, H] -> query [T, 1, N/tp, D], key and value [T, 1, Nkv/tp, D]."""
        cos, sin = self._pack.cos, self._pack.sin
        assert cos is not None
        assert sin is not None
        if self.config.num_query_groups < self.world_size:  # several ranks share a key-value head
            query, key, value = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
            query = ops.rotary(query.squeeze(1), cos, sin).unsqueeze(1)
            return query, ops.rotary(key.squeeze(1), cos, sin).unsqueeze(1), value
        qkv = self.linear_qkv(hidden_states)[0]  # [T, 1, Nkv/tp * (N/Nkv + 2) * D]
        norms = None
        if self.q_layernorm is not None:
            norms = ops.HeadNorms(self.q_layernorm(), self.k_layernorm(), self.q_layernorm.epsilon)
        groups = self.num_query_groups_per_partition
        query, key, value = ops.rotary_qkv(qkv.view(qkv.shape[0], groups, -1), cos, sin, norms)
        return query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)


class PreNormLayer(TransformerLayer):
    """Transformer layer of megatron-core in which a residual sum and the norm that follows it are one operator.

    Covers what transformer_config configures: no dropout, no cross attention, no recomputation of single modules.
    """

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[T/tp, 1, H] -> [T/tp, 1, H], and None for the context of cross attention."""
        attended, bias = self.self_attention(
            self.input_layernorm(hidden_states), attention_mask, packed_seq_params=kwargs["packed_seq_params"]
        )
        if bias is not None:
            attended = attended + bias
        normed, hidden_states = self.pre_mlp_layernorm(attended, hidden_states)
        output = self._forward_post_mlp(self.mlp(normed), hidden_states)
        added = kwargs["packed_seq_params"].added_after.get(self.layer_number)
        return output if added is None else output + added, None


def layer_spec(
    *,
    causal: bool,
    query_key_norm: bool,
    attention: ModuleSpec | None = None,
    output_bias: bool = False,
    mlp_bias: bool = False,
    experts: type[MegatronModule] | None = None,
    module: type[PreNormLayer] = PreNormLayer,
    norm: type[RMSNorm] = RMSNorm,
    activation: type[MegatronModule] = SwiGLU,
) -> ModuleSpec:
    """Build the spec of a pre-norm transformer layer.

    Args:
        causal: Use a causal mask.
        query_key_norm: Normalize queries and keys.
        attention: Replaces the default attention, in which case the first two arguments have no effect.
        output_bias: Add a bias to the output projection of the default attention, also if add_bias_linear is off.
        mlp_bias: Add biases to the dense MLP, also if add_bias_linear is off.
        experts: Replaces the dense MLP.
        module: Class of the layer.
        norm: Class of the norms before attention and MLP.
        activation: Class of the activation of the dense MLP.
    """
    mask = AttnMaskType.causal if causal else AttnMaskType.no_mask
    head_norm = HeadNorm if query_key_norm else None
    default_attention = ModuleSpec(
        module=PackedSelfAttention,
        params={"attn_mask_type": mask},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=BiasedRows if output_bias else RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    dense_mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(
            linear_fc1=BiasedColumns if mlp_bias else ColumnParallelLinear,
            linear_fc2=BiasedRows if mlp_bias else RowParallelLinear,
            activation_func=activation,
        ),
    )
    return ModuleSpec(
        module=module,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention or default_attention,
            pre_mlp_layernorm=norm,
            mlp=experts or dense_mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
