# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a transformers directory make which of our parameters, and how, in both directions.

Pure functions of configuration and tensors. The directory's names are those of Qwen2.5-VL in transformers 5
(model.visual.*, model.language_model.*, lm_head.weight), with Qwen3's norms of queries and keys.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from mindvl_model.config import MindVLConfig, VisionConfig
from mindvl_model.errors import WeightError
from mindvl_model.language_config import GroupedQueryConfig, LanguageConfig, Qwen2LanguageConfig
from mindvl_model.weights.moe import deepseek_v3_rules, qwen3_moe_rules
from mindvl_model.weights.rules import WeightRule, gated, grouped, same
from mindvl_ops import conv_weight_to_matmul, matmul_weight_to_conv

TEXT_MODELS = (
    "qwen3",
    "qwen3_moe",
    "deepseek_v3",
)  # directories of a language model alone, whose names start with "model."


def weight_rules(config: MindVLConfig) -> list[WeightRule]:
    """Every parameter of a model, in the order of its parts."""
    return [*_vision(config.vision), *_projector(), *LANGUAGE_RULES[config.language.kind](config.language)]


def canonical_name(hf_name: str, model_type: str) -> str:
    """The name that a tensor of a directory has in ours.

    Directories of text models and published Qwen2.5-VL directories have the decoder under "model.", the latter the
    vision encoder under "visual."; directories saved by some versions of transformers have our names already.
    """
    if hf_name.startswith("visual."):
        return f"model.{hf_name}"
    ours = model_type not in TEXT_MODELS and hf_name.startswith(("model.visual.", "model.language_model."))
    if hf_name.startswith("model.") and not ours:
        return hf_name.replace("model.", "model.language_model.", 1)
    return hf_name


def published_name(hf_name: str) -> str:
    """The name that a tensor of ours has in the published directories of Qwen2.5-VL."""
    return hf_name.replace("model.visual.", "visual.", 1).replace("model.language_model.", "model.", 1)


def further_layer(canonical: str, language: LanguageConfig) -> bool:
    """Whether a tensor belongs to a layer of multi-token prediction, which stands after the layers of the decoder."""
    layer = re.match(r"model\.language_model\.layers\.(\d{1,9})\.", canonical)
    return bool(layer and language.kind == "deepseek_v3" and int(layer[1]) >= language.num_layers)


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
        yield same(ours + "input_layernorm.weight", theirs + "norm1.weight")
        yield same(ours + "pre_mlp_layernorm.weight", theirs + "norm2.weight")
        for kind in ("weight", "bias"):
            yield WeightRule(
                f"{ours}self_attention.linear_qkv.{kind}",
                (f"{theirs}attn.qkv.{kind}",),
                # The directory holds all queries, all keys, all values; megatron wants q, k, v of one head together.
                lambda tensors: _by_head(tensors[0], heads, size),
                lambda tensor: [_swap_heads(tensor, tensor.shape[0] // (3 * size), 3, size)],
                sections=3,
            )
            yield same(f"{ours}self_attention.linear_proj.{kind}", f"{theirs}attn.proj.{kind}")
            yield gated(f"{ours}mlp.linear_fc1.{kind}", f"{theirs}mlp.gate_proj.{kind}", f"{theirs}mlp.up_proj.{kind}")
            yield same(f"{ours}mlp.linear_fc2.{kind}", f"{theirs}mlp.down_proj.{kind}")


def _projector() -> Iterator[WeightRule]:
    yield same("projector.norm.weight", "model.visual.merger.ln_q.weight")
    for kind in ("weight", "bias"):
        yield same(f"projector.fc1.{kind}", f"model.visual.merger.mlp.0.{kind}")
        yield same(f"projector.fc2.{kind}", f"model.visual.merger.mlp.2.{kind}")


def _grouped_query(config: GroupedQueryConfig) -> Iterator[WeightRule]:
    """Dense decoders of Qwen: Qwen2 has biases where Qwen3 has norms."""
    prefix = "model.language_model."
    yield same("language.embedding.word_embeddings.weight", f"{prefix}embed_tokens.weight")
    for layer in range(config.num_layers):
        ours, theirs = f"language.decoder.layers.{layer}.", f"{prefix}layers.{layer}."
        yield same(ours + "input_layernorm.weight", theirs + "input_layernorm.weight")
        yield same(ours + "pre_mlp_layernorm.weight", theirs + "post_attention_layernorm.weight")
        yield grouped(config, ours + "self_attention.linear_qkv", theirs + "self_attn.", "weight")
        if isinstance(config, Qwen2LanguageConfig):
            yield grouped(config, ours + "self_attention.linear_qkv", theirs + "self_attn.", "bias")
        else:
            yield same(ours + "self_attention.q_layernorm.weight", theirs + "self_attn.q_norm.weight")
            yield same(ours + "self_attention.k_layernorm.weight", theirs + "self_attn.k_norm.weight")
        yield same(ours + "self_attention.linear_proj.weight", theirs + "self_attn.o_proj.weight")
        yield gated(ours + "mlp.linear_fc1.weight", theirs + "mlp.gate_proj.weight", theirs + "mlp.up_proj.weight")
        yield same(ours + "mlp.linear_fc2.weight", theirs + "mlp.down_proj.weight")
    yield same("language.decoder.final_layernorm.weight", f"{prefix}norm.weight")
    if not config.tie_embeddings:
        yield same("language.output_layer.weight", "lm_head.weight")


LANGUAGE_RULES: dict[str, Callable[[Any], Iterator[WeightRule]]] = {  # by family
    "qwen2": _grouped_query,
    "qwen3": _grouped_query,
    "qwen3_moe": qwen3_moe_rules,
    "deepseek_v3": deepseek_v3_rules,
}


def _by_head(tensor: Tensor, heads: int, size: int) -> Tensor:
    """[3, N, size, ...] -> [N, 3, size, ...], flattened over the first three; N is `heads` or a rank's part of them."""
    local = tensor.shape[0] // (3 * size)
    if tensor.shape[0] != 3 * local * size or not local or heads % local:
        raise WeightError(f"{tensor.shape[0]} rows, but the configuration asks for {3 * heads * size}")
    return _swap_heads(tensor, 3, local, size)


def _swap_heads(tensor: Tensor, outer: int, inner: int, size: int) -> Tensor:
    """[outer, inner, size, ...] -> [inner, outer, size, ...], flattened over the first three."""
    return tensor.reshape(outer, inner, size, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape).contiguous()
