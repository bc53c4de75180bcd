# SPDX-License-Identifier: Apache-2.0
"""Cosine and sine of a decoder's rotary embedding, from its RopeConfig: scaling of frequencies, one or three axes.

Comes after position ids are computed, once per packed sequence. Sources: YaRN (arXiv 2309.00071) and the scaling of
Llama 3.1 (arXiv 2407.21783), with the rounding and frequencies of transformers 5.
"""

import math

import torch
from torch import Tensor

from mindvl_model.language_config import LanguageConfig, LatentAttention, Llama3Scaling, YarnConfig
from mindvl_ops import mrope_tables, rotary_tables, to_device


def rotary_angles(config: LanguageConfig, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [T, rotary width] float32 for position_ids [3, T] (time, height, width).

    Without M-RoPE, positions have one axis, so only position_ids[0] is used.
    """
    rope, width = config.rope, config.attention.rotary_width
    frequencies, factor = None, 1.0
    if rope.scaling is not None:
        scaled, factor = rotary_frequencies(config)
        frequencies = to_device(scaled, position_ids.device)
    if rope.mrope_sections is None:
        cos, sin = rotary_tables(
            position_ids[0], width, rope.rotary_base, rope.interleaved_pairs, frequencies=frequencies
        )
    else:
        cos, sin = mrope_tables(
            position_ids,
            width,
            rope.rotary_base,
            rope.mrope_sections,
            rope.interleaved_pairs,
            alternating=rope.sections_interleaved,
            frequencies=frequencies,
        )
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotary_frequencies(config: LanguageConfig) -> tuple[Tensor, float]:
    """Return the rotary frequencies [rotary width / 2] in radians per token, and the factor of cosine and sine."""
    width, base, scaling = config.attention.rotary_width, config.rope.rotary_base, config.rope.scaling
    wavelengths = base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if scaling is None:
        return 1.0 / wavelengths, 1.0
    if scaling.kind == "linear":
        return 1.0 / wavelengths / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _smoothly_scaled(scaling, 1.0 / wavelengths), 1.0
    return _yarn(scaling, wavelengths, base)


def softmax_scale(config: LanguageConfig, attention: LatentAttention) -> float:
    """The scale of the logits of latent attention, which YaRN increases."""
    scale: float = (attention.nope_head_dim + attention.rope_head_dim) ** -0.5
    yarn = config.rope.scaling
    if yarn is not None and yarn.kind == "yarn" and yarn.mscale_all_dim:
        scale *= _magnitude(yarn, yarn.mscale_all_dim) ** 2
    return scale


def _smoothly_scaled(scaling: Llama3Scaling, frequencies: Tensor) -> Tensor:
    """Keep frequencies with many rotations within the original length, divide those with few, interpolate between."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(yarn: YarnConfig, wavelengths: Tensor, base: float) -> tuple[Tensor, float]:
    """YaRN keeps high frequencies, divides low frequencies by `factor`, and interpolates linearly in between."""
    width = 2 * len(wavelengths)

    def pair_with(turns: float) -> float:
        return width * math.log(yarn.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, width - 1)
    stretched = ((torch.arange(width // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    frequencies = stretched / (yarn.factor * wavelengths) + (1 - stretched) / wavelengths
    if yarn.attention_factor is not None:
        return frequencies, yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return frequencies, _magnitude(yarn, yarn.mscale) / _magnitude(yarn, yarn.mscale_all_dim)
    return frequencies, _magnitude(yarn, 1.0)


def _magnitude(yarn: YarnConfig, mscale: float) -> float:
    return 0.1 * mscale * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0
