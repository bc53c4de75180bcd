# SPDX-License-Identifier: Apache-2.0
"""Configuration and construction of megatron-core's blocks for tower, projector and language model.

Comes after spec.py; its callers hand over plain numbers and get modules back.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    scatter_to_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import mindvl_ops as ops
from mindvl_model.language_config import DecoderConfig, GroupedQueryConfig
from mindvl_model.megatron.packing import PackedRow
from mindvl_model.megatron.spec import RMSNorm, layer_spec

__all__ = [
    "LanguageModel",
    "MegatronModule",
    "PackedRow",
    "RMSNorm",
    "TransformerConfig",
    "build_language_model",
    "build_mlp_pair",
    "build_vision_block",
    "grouped_query_config",
    "transformer_config",
]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is spread and computed; the defaults are one process in fp32."""

    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def sequence_parallel(self) -> bool:
        """With tensor parallel always on: norms and dropout then work on a slice of the row."""
        return self.tp_size > 1


def transformer_config(layout: Layout, **sizes: Any) -> TransformerConfig:
    """A TransformerConfig with what all our blocks share; sizes are its own fields."""
    shared: dict[str, Any] = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "use_te_activation_func": True,  # take the activation from the spec: our SwiGLU
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "perform_initialization": False,  # mindvl_model.parameters does it, the same in every layout
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "tensor_model_parallel_size": layout.tp_size,
        "pipeline_model_parallel_size": layout.pp_size,
        "context_parallel_size": layout.cp_size,
        "sequence_parallel": layout.sequence_parallel,
        "params_dtype": layout.dtype,
        "pipeline_dtype": layout.dtype,
        "bf16": layout.dtype == torch.bfloat16,
        "calculate_per_token_loss": True,  # losses are summed and divided once, by the global count of learned tokens
    }
    return TransformerConfig(**{**shared, **sizes})


def build_vision_block(config: TransformerConfig) -> TransformerBlock:
    """All layers of the vision tower, without a norm at the end (the projector brings it)."""
    spec = layer_spec(causal=False, query_key_norm=False)
    submodules = TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=RMSNorm)
    return TransformerBlock(config, submodules, post_layer_norm=False)


def build_mlp_pair(layout: Layout, input_size: int, hidden_size: int, output_size: int) -> tuple[Any, Any]:
    """Two linear layers with bias, split over tensor parallel between them: (input -> hidden, hidden -> output)."""
    config = transformer_config(
        Layout(tp_size=layout.tp_size, dtype=layout.dtype),
        num_layers=1,
        hidden_size=input_size,
        num_attention_heads=1,
        sequence_parallel=False,
    )

    def keep(weight: Tensor) -> Tensor:
        return weight

    first = ColumnParallelLinear(
        input_size, hidden_size, config=config, init_method=keep, bias=True, gather_output=False
    )
    second = RowParallelLinear(
        hidden_size,
        output_size,
        config=config,
        init_method=keep,
        bias=True,
        input_is_parallel=True,
        skip_bias_add=False,
    )
    return first, second


class LanguageModel(GPTModel):
    """megatron-core's GPT whose loss comes from our cross entropy; labels of -100 cost nothing."""

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Loss by token [1, T] in float32 from labels [1, T] and logits [T, 1, V/tp]."""
        if self.config.tensor_model_parallel_size == 1:
            return ops.cross_entropy(logits.squeeze(1), labels.squeeze(0)).unsqueeze(0)
        learned = labels != -100
        loss = vocab_parallel_cross_entropy(logits.float(), labels.clamp(min=0).transpose(0, 1).contiguous())
        return loss.transpose(0, 1) * learned

    def scatter(self, embeddings: Tensor) -> Tensor:
        """This rank's part of the row [T, 1, H], when norms work on slices of it."""
        if self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(embeddings)
        return embeddings


def grouped_query_config(config: GroupedQueryConfig, layout: Layout, **more: Any) -> TransformerConfig:
    """megatron-core's configuration of a decoder with grouped-query attention; `more` are its own fields."""
    return transformer_config(
        layout,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.ffn_hidden_size,
        layernorm_epsilon=config.norm_epsilon,
        add_bias_linear=False,
        **more,
    )


def build_language_model(
    transformer: TransformerConfig,
    config: DecoderConfig,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> LanguageModel:
    """The decoder, or one pipeline stage of it. Rotary angles come with the packed row, not from the model."""
    spec = layer_spec(causal=True, query_key_norm=transformer.qk_layernorm)
    block = TransformerBlockSubmodules(
        layer_specs=[spec] * get_num_layers_to_build(transformer, vp_stage=vp_stage), layer_norm=RMSNorm
    )
    return LanguageModel(
        transformer,
        block,
        config.vocab_size,
        config.max_positions,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=config.tie_embeddings,
        position_embedding_type="none",
        scatter_embedding_sequence_parallel=False,
        vp_stage=vp_stage,
    )
