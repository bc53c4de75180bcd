# SPDX-License-Identifier: Apache-2.0
"""Map the tensors of a transformers directory to the parameters of the model and back.

Pure functions of configuration and tensors. The names of the tensors are those of Qwen2.5-VL in transformers 5
(model.visual.*, model.language_model.*, lm_head.weight); decoder.py has the rules of the language model.
"""

import re
from collections.abc import Iterable, Iterator

from torch import Tensor

from mindvl_model.config import MindVLConfig, VisionConfig
from mindvl_model.errors import WeightError
from mindvl_model.language_config import LanguageConfig
from mindvl_model.parameters import Part
from mindvl_model.vision.entries import VISION_ENTRIES
from mindvl_model.weights.decoder import HF_DECODER, decoder_rules
from mindvl_model.weights.rules import WeightRule, gated, same
from mindvl_ops import conv_weight_to_matmul, matmul_weight_to_conv

HF_VISION = "model.visual."


def weight_rules(config: MindVLConfig) -> list[WeightRule]:
    """The rules of all parameters of a model, in the order of its parts."""
    return [*_vision(config.vision), *_projector(config.vision), *decoder_rules(config.language)]


def canonical_name(hf_name: str) -> str:
    """The canonical name of a tensor in a directory: that of Qwen2.5-VL in transformers 5.

    Text models and published Qwen2.5-VL directories have the decoder under "model.", the latter also the vision encoder
    under "visual."; text models without an output layer, such as models of text embeddings, have no prefix. Directories
    saved by some versions of transformers already have the canonical names.
    """
    if hf_name.startswith("visual."):
        return f"model.{hf_name}"
    if hf_name.startswith(("embed_tokens.", "layers.", "norm.")):
        return f"{HF_DECODER}{hf_name}"
    if hf_name.startswith("model.") and not hf_name.startswith(("model.visual.", HF_DECODER)):
        return hf_name.replace("model.", HF_DECODER, 1)
    return hf_name


def published_name(hf_name: str) -> str:
    """The name of a tensor in the published directories of Qwen2.5-VL, from its canonical name."""
    return hf_name.replace("model.visual.", "visual.", 1).replace("model.language_model.", "model.", 1)


def further_layer(canonical: str, language: LanguageConfig) -> str | None:
    """The prefix of the layer of a tensor after the layers of the decoder, where multi-token prediction is stored."""
    layer = re.match(rf"{re.escape(HF_DECODER)}layers\.(\d{{1,9}})\.", canonical)
    return layer[0] if layer and int(layer[1]) >= language.num_layers else None


def mtp_layers(canonical: Iterable[str], language: LanguageConfig) -> set[str]:
    """Prefixes of the layers after those of the decoder that are multi-token prediction layers, by their tensors."""
    prefixes = {name.removesuffix("eh_proj.weight") for name in canonical if name.endswith("eh_proj.weight")}
    return {prefix for prefix in prefixes if further_layer(prefix, language)}


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


def _by_head(tensor: Tensor, heads: int, size: int) -> Tensor:
    """[3, N, size, ...] -> [N, 3, size, ...], flattened over the first three axes; N is `heads`, or `heads` / tp_size."""
    local = tensor.shape[0] // (3 * size)
    if tensor.shape[0] != 3 * local * size or not local or heads % local:
        raise WeightError(f"rows: must be {3 * heads * size}, got {tensor.shape[0]}.")
    return _swap_heads(tensor, 3, local, size)


def _swap_heads(tensor: Tensor, outer: int, inner: int, size: int) -> Tensor:
    """[outer, inner, size, ...] -> [inner, outer, size, ...], flattened over the first three axes."""
    return tensor.reshape(outer, inner, size, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape).contiguous()
