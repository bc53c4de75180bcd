# SPDX-License-Identifier: Apache-2.0
"""Map the tensors of a transformers directory to the parameters of the model and back.

Pure functions of configuration and tensors. The names of the tensors are those of Qwen2.5-VL in transformers 5
(model.visual.*, model.language_model.*, lm_head.weight), with Qwen3's norms of queries and keys.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from mindvl_model.config import MindVLConfig, VisionConfig
from mindvl_model.errors import WeightError
from mindvl_model.language_config import GroupedQueryConfig, LanguageConfig, Qwen2LanguageConfig
from mindvl_model.weights.moe import HF_DECODER, deepseek_v3_rules, qwen3_moe_rules
from mindvl_model.weights.rules import WeightRule, gated, grouped, same
from mindvl_ops import conv_weight_to_matmul, matmul_weight_to_conv

TEXT_MODELS = ("qwen3", "qwen3_moe", "deepseek_v3")  # language models without vision; tensor names start with "model."


def weight_rules(config: MindVLConfig) -> list[WeightRule]:
    """The rules of all parameters of a model, in the order of its parts."""
    return [*_vision(config.vision), *_projector(), *LANGUAGE_RULES[config.language.kind](config.language)]


def canonical_name(hf_name: str, model_type: str) -> str:
    """The canonical name of a tensor in a directory: that of Qwen2.5-VL in transformers 5.

    Text models and published Qwen2.5-VL directories have the decoder under "model.", the latter also the vision encoder
    under "visual."; directories saved by some versions of transformers already have the canonical names.
    """
    if hf_name.startswith("visual."):
        return f"model.{hf_name}"
    is_canonical = model_type not in TEXT_MODELS and hf_name.startswith(("model.visual.", "model.language_model."))
    if hf_name.startswith("model.") and not is_canonical:
        return hf_name.replace("model.", "model.language_model.", 1)
    return hf_name


def published_name(hf_name: str) -> str:
    """The name of a tensor in the published directories of Qwen2.5-VL, from its canonical name."""
    return hf_name.replace("model.visual.", "visual.", 1).replace("model.language_model.", "model.", 1)


def further_layer(canonical: str, language: LanguageConfig) -> bool:
    """Whether a tensor belongs to a multi-token prediction layer; these follow the layers of the decoder."""
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
        prefix, hf_prefix = f"vision.blocks.layers.{layer}.", f"model.visual.blocks.{layer}."
        yield same(prefix + "input_layernorm.weight", hf_prefix + "norm1.weight")
        yield same(prefix + "pre_mlp_layernorm.weight", hf_prefix + "norm2.weight")
        for kind in ("weight", "bias"):
            yield WeightRule(
                f"{prefix}self_attention.linear_qkv.{kind}",
                (f"{hf_prefix}attn.qkv.{kind}",),
                # Stored as all queries, all keys, all values; megatron-core groups q, k, v of each head.
                lambda tensors: _by_head(tensors[0], heads, size),
                lambda tensor: [_swap_heads(tensor, tensor.shape[0] // (3 * size), 3, size)],
                sections=3,
            )
            yield same(f"{prefix}self_attention.linear_proj.{kind}", f"{hf_prefix}attn.proj.{kind}")
            yield gated(
                f"{prefix}mlp.linear_fc1.{kind}", f"{hf_prefix}mlp.gate_proj.{kind}", f"{hf_prefix}mlp.up_proj.{kind}"
            )
            yield same(f"{prefix}mlp.linear_fc2.{kind}", f"{hf_prefix}mlp.down_proj.{kind}")


def _projector() -> Iterator[WeightRule]:
    yield same("projector.norm.weight", "model.visual.merger.ln_q.weight")
    for kind in ("weight", "bias"):
        yield same(f"projector.fc1.{kind}", f"model.visual.merger.mlp.0.{kind}")
        yield same(f"projector.fc2.{kind}", f"model.visual.merger.mlp.2.{kind}")


def _grouped_query(config: GroupedQueryConfig) -> Iterator[WeightRule]:
    """Dense Qwen decoders: Qwen2 has biases of queries, keys and values, Qwen3 has norms of queries and keys."""

    yield same("language.embedding.word_embeddings.weight", f"{HF_DECODER}embed_tokens.weight")
    for layer in range(config.num_layers):
        prefix, hf_prefix = f"language.decoder.layers.{layer}.", f"{HF_DECODER}layers.{layer}."
        yield same(prefix + "input_layernorm.weight", hf_prefix + "input_layernorm.weight")
        yield same(prefix + "pre_mlp_layernorm.weight", hf_prefix + "post_attention_layernorm.weight")
        yield grouped(config, prefix + "self_attention.linear_qkv", hf_prefix + "self_attn.", "weight")
        if isinstance(config, Qwen2LanguageConfig):
            yield grouped(config, prefix + "self_attention.linear_qkv", hf_prefix + "self_attn.", "bias")
        else:
            yield same(prefix + "self_attention.q_layernorm.weight", hf_prefix + "self_attn.q_norm.weight")
            yield same(prefix + "self_attention.k_layernorm.weight", hf_prefix + "self_attn.k_norm.weight")
        yield same(prefix + "self_attention.linear_proj.weight", hf_prefix + "self_attn.o_proj.weight")
        yield gated(
            prefix + "mlp.linear_fc1.weight", hf_prefix + "mlp.gate_proj.weight", hf_prefix + "mlp.up_proj.weight"
        )
        yield same(prefix + "mlp.linear_fc2.weight", hf_prefix + "mlp.down_proj.weight")
    yield same("language.decoder.final_layernorm.weight", f"{HF_DECODER}norm.weight")
    if not config.tie_embeddings:
        yield same("language.output_layer.weight", "lm_head.weight")


LANGUAGE_RULES: dict[str, Callable[[Any], Iterator[WeightRule]]] = {  # by family
    "qwen2": _grouped_query,
    "qwen3": _grouped_query,
    "qwen3_moe": qwen3_moe_rules,
    "deepseek_v3": deepseek_v3_rules,
}


def _by_head(tensor: Tensor, heads: int, size: int) -> Tensor:
    """[3, N, size, ...] -> [N, 3, size, ...], flattened over the first three axes; N is `heads`, or `heads` / tp_size."""
    local = tensor.shape[0] // (3 * size)
    if tensor.shape[0] != 3 * local * size or not local or heads % local:
        raise WeightError(f"rows: must be {3 * heads * size}, got {tensor.shape[0]}.")
    return _swap_heads(tensor, 3, local, size)


def _swap_heads(tensor: Tensor, outer: int, inner: int, size: int) -> Tensor:
    """[outer, inner, size, ...] -> [inner, outer, size, ...], flattened over the first three axes."""
    return tensor.reshape(outer, inner, size, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape).contiguous()
