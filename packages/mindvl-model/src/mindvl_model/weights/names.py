# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a transformers folder make which of our parameters, and how, in both directions.

Pure functions of configuration and tensors. The folder's names are those of Qwen2.5-VL in transformers 5
(model.visual.*, model.language_model.*, lm_head.weight), with Qwen3's norms of queries and keys.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindvl_model.config import MindVLConfig, VisionConfig
from mindvl_model.errors import WeightError
from mindvl_model.language_config import GroupedQueryConfig, Qwen2LanguageConfig
from mindvl_ops import conv_weight_to_matmul, matmul_weight_to_conv


@dataclass(frozen=True)
class WeightRule:
    """One parameter of ours and the tensors of the folder it is made of."""

    param_name: str
    hf_names: tuple[str, ...]
    join: Callable[[list[Tensor]], Tensor]  # folder -> ours
    split: Callable[[Tensor], list[Tensor]]  # ours -> folder


def weight_rules(config: MindVLConfig) -> list[WeightRule]:
    """Every parameter of a model, in the order of its parts."""
    return [*_vision(config.vision), *_projector(), *LANGUAGE_RULES[config.language.kind](config.language)]


def canonical_name(hf_name: str, model_type: str) -> str:
    """The name a tensor of another family's folder has in ours: Qwen3 and Qwen2.5-VL (published or re-saved)."""
    if model_type == "qwen3":
        return hf_name.replace("model.", "model.language_model.", 1) if hf_name.startswith("model.") else hf_name
    if hf_name.startswith("visual."):
        return f"model.{hf_name}"
    return hf_name


def _vision(config: VisionConfig) -> Iterator[WeightRule]:
    kernel = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    yield WeightRule(
        "vision.patch_embed.weight",
        ("model.visual.patch_embed.proj.weight",),
        lambda tensors: conv_weight_to_matmul(tensors[0]),
        lambda tensor: [matmul_weight_to_conv(tensor, kernel)],
    )
    heads, size = config.num_heads, config.head_dim
    for layer in range(config.num_layers):
        ours, theirs = f"vision.blocks.layers.{layer}.", f"model.visual.blocks.{layer}."
        yield _same(ours + "input_layernorm.weight", theirs + "norm1.weight")
        yield _same(ours + "pre_mlp_layernorm.weight", theirs + "norm2.weight")
        for kind in ("weight", "bias"):
            yield WeightRule(
                f"{ours}self_attention.linear_qkv.{kind}",
                (f"{theirs}attn.qkv.{kind}",),
                # The folder holds all queries, all keys, all values; megatron wants q, k, v of one head together.
                lambda tensors: _swap_heads(tensors[0], 3, heads, size),
                lambda tensor: [_swap_heads(tensor, heads, 3, size)],
            )
            yield _same(f"{ours}self_attention.linear_proj.{kind}", f"{theirs}attn.proj.{kind}")
            yield _gated(f"{ours}mlp.linear_fc1.{kind}", f"{theirs}mlp.gate_proj.{kind}", f"{theirs}mlp.up_proj.{kind}")
            yield _same(f"{ours}mlp.linear_fc2.{kind}", f"{theirs}mlp.down_proj.{kind}")


def _projector() -> Iterator[WeightRule]:
    yield _same("projector.norm.weight", "model.visual.merger.ln_q.weight")
    for kind in ("weight", "bias"):
        yield _same(f"projector.fc1.{kind}", f"model.visual.merger.mlp.0.{kind}")
        yield _same(f"projector.fc2.{kind}", f"model.visual.merger.mlp.2.{kind}")


def _grouped_query(config: GroupedQueryConfig) -> Iterator[WeightRule]:
    """Dense decoders of Qwen: Qwen2 has biases where Qwen3 has norms."""
    prefix = "model.language_model."
    yield _same("language.embedding.word_embeddings.weight", f"{prefix}embed_tokens.weight")
    for layer in range(config.num_layers):
        ours, theirs = f"language.decoder.layers.{layer}.", f"{prefix}layers.{layer}."
        yield _same(ours + "input_layernorm.weight", theirs + "input_layernorm.weight")
        yield _same(ours + "pre_mlp_layernorm.weight", theirs + "post_attention_layernorm.weight")
        yield _grouped(config, ours + "self_attention.linear_qkv", theirs + "self_attn.", "weight")
        if isinstance(config, Qwen2LanguageConfig):
            yield _grouped(config, ours + "self_attention.linear_qkv", theirs + "self_attn.", "bias")
        else:
            yield _same(ours + "self_attention.q_layernorm.weight", theirs + "self_attn.q_norm.weight")
            yield _same(ours + "self_attention.k_layernorm.weight", theirs + "self_attn.k_norm.weight")
        yield _same(ours + "self_attention.linear_proj.weight", theirs + "self_attn.o_proj.weight")
        yield _gated(ours + "mlp.linear_fc1.weight", theirs + "mlp.gate_proj.weight", theirs + "mlp.up_proj.weight")
        yield _same(ours + "mlp.linear_fc2.weight", theirs + "mlp.down_proj.weight")
    yield _same("language.decoder.final_layernorm.weight", f"{prefix}norm.weight")
    if not config.tie_embeddings:
        yield _same("language.output_layer.weight", "lm_head.weight")


LANGUAGE_RULES: dict[str, Callable[[Any], Iterator[WeightRule]]] = {  # by family
    "qwen2": _grouped_query,
    "qwen3": _grouped_query,
}


def _same(param_name: str, hf_name: str) -> WeightRule:
    return WeightRule(param_name, (hf_name,), lambda tensors: tensors[0], lambda tensor: [tensor])


def _gated(param_name: str, gate: str, up: str) -> WeightRule:
    return WeightRule(param_name, (gate, up), torch.cat, lambda tensor: list(tensor.chunk(2)))


def _grouped(config: GroupedQueryConfig, param_name: str, prefix: str, kind: str) -> WeightRule:
    """Grouped-query attention: megatron keeps the queries of a group, its key and its value together."""
    groups, size = config.num_kv_heads, config.head_dim
    queries = config.num_heads // groups

    def join(tensors: list[Tensor]) -> Tensor:
        width = tensors[0].shape[1:]
        parts = [tensor.reshape(groups, -1, size, *width) for tensor in tensors]
        return torch.cat(parts, dim=1).reshape(-1, *width)

    def split(tensor: Tensor) -> list[Tensor]:
        width = tensor.shape[1:]
        parts = tensor.reshape(groups, queries + 2, size, *width).split((queries, 1, 1), dim=1)
        return [part.reshape(-1, *width).contiguous() for part in parts]

    return WeightRule(f"{param_name}.{kind}", tuple(f"{prefix}{name}_proj.{kind}" for name in "qkv"), join, split)


def _swap_heads(tensor: Tensor, outer: int, inner: int, size: int) -> Tensor:
    """[outer, inner, size, ...] -> [inner, outer, size, ...], flattened over the first three."""
    if tensor.shape[0] != outer * inner * size:
        raise WeightError(f"{tensor.shape[0]} rows, but the configuration asks for {outer * inner * size}")
    return tensor.reshape(outer, inner, size, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape).contiguous()
