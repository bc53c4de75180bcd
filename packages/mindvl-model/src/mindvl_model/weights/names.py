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
from mindvl_model.parameters import Part
from mindvl_model.vision.entries import VISION_ENTRIES
from mindvl_model.weights.moe import HF_DECODER, deepseek_v3_rules, qwen3_moe_rules
from mindvl_model.weights.rules import WeightRule, gated, grouped, same
from mindvl_ops import conv_weight_to_matmul, matmul_weight_to_conv

HF_VISION = "model.visual."
TEXT_MODELS = ("qwen3", "qwen3_moe", "deepseek_v3")  # language models without vision; tensor names start with "model."


def weight_rules(config: MindVLConfig) -> list[WeightRule]:
    """The rules of all parameters of a model, in the order of its parts."""
    return [*_vision(config.vision), *_projector(config.vision), *LANGUAGE_RULES[config.language.kind](config.language)]


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
    entry, stored = config.entry, config.entry.tensors
    yield WeightRule(
        "vision.patch_embed.weight",
        (f"{HF_VISION}{stored.patch_embedding}.weight",),
        lambda tensors: conv_weight_to_matmul(tensors[0]),
        lambda tensor: [matmul_weight_to_conv(tensor, kernel)],
    )
    if entry.patch_bias:
        yield same("vision.patch_embed.bias", f"{HF_VISION}{stored.patch_embedding}.bias")
    if config.num_position_embeddings:
        yield same("vision.position_embedding.weight", f"{HF_VISION}{stored.position_embedding}.weight")
    heads, size = config.num_heads, config.head_dim
    *up, down = stored.mlp
    for layer in range(config.num_layers):
        prefix, hf_prefix = f"vision.blocks.layers.{layer}.", f"{HF_VISION}blocks.{layer}."
        for kind in ("weight", "bias") if entry.norm_bias else ("weight",):
            yield same(f"{prefix}input_layernorm.{kind}", f"{hf_prefix}{stored.norms[0]}.{kind}")
            yield same(f"{prefix}pre_mlp_layernorm.{kind}", f"{hf_prefix}{stored.norms[1]}.{kind}")
        for kind in ("weight", "bias"):
            yield WeightRule(
                f"{prefix}self_attention.linear_qkv.{kind}",
                (f"{hf_prefix}{stored.qkv}.{kind}",),
                # Stored as all queries, all keys, all values; megatron-core groups q, k, v of each head.
                lambda tensors: _by_head(tensors[0], heads, size),
                lambda tensor: [_swap_heads(tensor, tensor.shape[0] // (3 * size), 3, size)],
                sections=3,
            )
            yield same(f"{prefix}self_attention.linear_proj.{kind}", f"{hf_prefix}{stored.attention_output}.{kind}")
            first, names = f"{prefix}mlp.linear_fc1.{kind}", [f"{hf_prefix}{name}.{kind}" for name in up]
            yield gated(first, *names) if entry.gated else same(first, *names)
            yield same(f"{prefix}mlp.linear_fc2.{kind}", f"{hf_prefix}{down}.{kind}")


def _projector(config: VisionConfig) -> Iterator[WeightRule]:
    stored = config.entry.tensors
    mergers = [("projector.", stored.merger)]
    mergers += [
        (f"projector.deepstack.{number}.", f"{stored.extra_mergers}.{number}")
        for number in range(len(config.deepstack_layers))
    ]
    norm, first, second = stored.merger_parts
    for prefix, merger in mergers:
        for kind in ("weight", "bias") if config.entry.norm_bias else ("weight",):
            yield same(f"{prefix}norm.{kind}", f"{HF_VISION}{merger}.{norm}.{kind}")
        for kind in ("weight", "bias"):
            yield same(f"{prefix}fc1.{kind}", f"{HF_VISION}{merger}.{first}.{kind}")
            yield same(f"{prefix}fc2.{kind}", f"{HF_VISION}{merger}.{second}.{kind}")


def vision_part(canonical: str) -> Part | None:
    """The part of a tensor of a vision encoder, whose mergers are the projector; None for other tensors."""
    if not canonical.startswith(HF_VISION):
        return None
    component = canonical.removeprefix(HF_VISION).split(".", 1)[0]
    mergers = {
        name for entry in VISION_ENTRIES.values() for name in (entry.tensors.merger, entry.tensors.extra_mergers)
    }
    return "projector" if component in mergers else "vision"


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
