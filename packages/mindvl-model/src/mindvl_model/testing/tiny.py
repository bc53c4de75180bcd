# SPDX-License-Identifier: Apache-2.0
"""The smallest model in which every part still works: two layers each, windowed and full vision attention.

Smaller than the named size "tiny", which is meant to learn something; comes before packs.py makes its inputs.
"""

from dataclasses import replace
from typing import Any

import torch

from mindvl_model.config import MindVLConfig, TokenConfig, VisionConfig
from mindvl_model.language_config import (
    DeepSeekV3LanguageConfig,
    LanguageConfig,
    Qwen2LanguageConfig,
    Qwen3LanguageConfig,
    Qwen3MoELanguageConfig,
    YarnConfig,
)


def smallest_config(*, vocab_size: int = 64, tie_embeddings: bool = False) -> MindVLConfig:
    """A model of about 25 thousand parameters; windows of two merge blocks, grouped key-value heads.

    Args:
        vocab_size: At least 8; the special tokens are those of Qwen in their usual order, from 0.
    """
    return MindVLConfig(
        vision=VisionConfig(
            hidden_size=16,
            num_layers=2,
            num_heads=2,
            ffn_hidden_size=24,
            full_attention_layers=(1,),
            window_size=56,
            init_std=0.1,
        ),
        language=Qwen3LanguageConfig(
            hidden_size=24,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            ffn_hidden_size=40,
            vocab_size=vocab_size,
            tie_embeddings=tie_embeddings,
            rotary_base=10000.0,
            max_positions=512,
            init_std=0.1,
        ),
        tokens=TokenConfig(image=5, vision_start=3, vision_end=4, end_of_turn=2, pad=0, video=6),
    )


def smallest_qwen2_5_vl(*, vocab_size: int = 64, tie_embeddings: bool = False) -> MindVLConfig:
    """The smallest Qwen2.5-VL: biased attention, four rotary pairs of which one follows time and one height."""
    language = Qwen2LanguageConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mrope_sections=(1, 1, 2),
        ffn_hidden_size=40,
        vocab_size=vocab_size,
        tie_embeddings=tie_embeddings,
        rotary_base=10000.0,
        max_positions=512,
        init_std=0.1,
    )
    return replace(smallest_config(vocab_size=vocab_size), language=language)


def smallest_qwen3_moe(**changes: Any) -> MindVLConfig:
    """The smallest model with Qwen3's experts: eight, two for each token, in both layers."""
    settings: dict[str, Any] = {
        "num_experts": 8,
        "experts_per_token": 2,
        "expert_ffn_hidden_size": 12,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden_size": 40,
    }
    return _with_language(Qwen3MoELanguageConfig(**_SHARED | settings | changes))


def smallest_deepseek_v3(**changes: Any) -> MindVLConfig:
    """The smallest DeepSeek-V3: one dense layer, two of 8 experts in 4 groups, one that predicts a token further."""
    settings: dict[str, Any] = {
        "num_layers": 3,
        "ffn_hidden_size": 40,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "nope_head_dim": 8,
        "rope_head_dim": 8,
        "value_head_dim": 6,
        "num_dense_layers": 1,
        "num_experts": 8,
        "experts_per_token": 2,
        "expert_ffn_hidden_size": 12,
        "num_expert_groups": 4,
        "groups_per_token": 2,
        "yarn": YarnConfig(factor=4.0, original_max_positions=128, mscale_all_dim=0.7),
    }
    return _with_language(DeepSeekV3LanguageConfig(**_SHARED | settings | changes))


_SHARED: dict[str, Any] = {
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 64,
    "rotary_base": 10000.0,
    "max_positions": 512,
    "init_std": 0.1,
}


def _with_language(language: LanguageConfig) -> MindVLConfig:
    return replace(smallest_config(), language=language)


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every parameter random values, norms and biases too, so that a mistake in any of them shows.

    The routers' biases become large enough to change who is chosen.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 and name.endswith("weight") else 0.15 * noise)
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith("expert_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
