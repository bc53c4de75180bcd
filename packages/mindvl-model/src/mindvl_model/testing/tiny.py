# SPDX-License-Identifier: Apache-2.0
"""Very small models with every part: two layers each, window and full vision attention.

Smaller than the named size "tiny", which can be trained; mindvl_model.random_inputs makes their inputs.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mindvl_model.config import MindVLConfig, TokenConfig, VisionConfig
from mindvl_model.families.deepseek_v3 import DeepSeekV3Preset
from mindvl_model.families.llama import LlamaPreset
from mindvl_model.families.qwen2 import Qwen2Preset
from mindvl_model.families.qwen3 import Qwen3Preset
from mindvl_model.families.qwen3_moe import Qwen3MoEPreset
from mindvl_model.families.qwen3_vl import Qwen3VLMoEPreset, Qwen3VLPreset
from mindvl_model.families.registry import LanguagePreset
from mindvl_model.hf.config_json import hf_config
from mindvl_model.hf.load import load_hf_directory
from mindvl_model.language_config import Llama3Scaling, YarnConfig


def smallest_config(*, vocab_size: int = 64, tie_embeddings: bool = False) -> MindVLConfig:
    """A Qwen3 model of about 25,000 parameters, with windows of two merge blocks and grouped-query attention.

    Args:
        vocab_size: At least 8, because the special tokens have ids from 0 to 6.
        tie_embeddings: Share the embedding with the output layer.
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
        language=Qwen3Preset(
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
        ).decoder(),
        tokens=TokenConfig(image=5, vision_start=3, vision_end=4, end_of_turn=2, pad=0, video=6),
    )


def smallest_qwen2_5_vl(*, vocab_size: int = 64, tie_embeddings: bool = False) -> MindVLConfig:
    """A Qwen2.5-VL model: attention biases, and four rotary pairs, of which one is for time and one for height."""
    language = Qwen2Preset(
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
    return replace(smallest_config(vocab_size=vocab_size), language=language.decoder())


def smallest_qwen3_moe(**changes: Any) -> MindVLConfig:
    """A Qwen3-MoE model: eight experts in both layers, two per token; `changes` are fields of the language model."""
    settings: dict[str, Any] = {
        "num_experts": 8,
        "experts_per_token": 2,
        "expert_ffn_hidden_size": 12,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden_size": 40,
    }
    return _with_language(Qwen3MoEPreset(**_SHARED | settings | changes))


def smallest_deepseek_v3(**changes: Any) -> MindVLConfig:
    """A DeepSeek-V3 model: a dense layer, two layers with 8 experts in 4 groups, one multi-token prediction layer."""
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
    return _with_language(DeepSeekV3Preset(**_SHARED | settings | changes))


def smallest_llama(**changes: Any) -> MindVLConfig:
    """A Llama model with a head size of its own and scaled rotary frequencies of each range."""
    settings: dict[str, Any] = {
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden_size": 40,
        "rope_scaling": Llama3Scaling(original_max_positions=64),
    }
    return _with_language(LlamaPreset(**_SHARED | settings | changes))


_SHARED: dict[str, Any] = {
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 64,
    "rotary_base": 10000.0,
    "max_positions": 512,
    "init_std": 0.1,
}


def _with_language(preset: LanguagePreset) -> MindVLConfig:
    return replace(smallest_config(), language=preset.decoder())


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Set every parameter, including norms and biases, to random values, so that a test can detect an error in any.

    The routing biases are large enough to change the selected experts.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 and name.endswith("weight") else 0.15 * noise)
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith(("expert_bias", "e_score_correction_bias")):  # the latter in transformers
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def smallest_qwen3_vl(*, vision: dict[str, Any] | None = None, **changes: Any) -> MindVLConfig:
    """A Qwen3-VL model: two deepstack outputs, 7 x 7 positions, four rotary pairs, of which two are for time.

    Args:
        vision: Fields of the vision encoder.
        changes: Fields of the language model.
    """
    settings: dict[str, Any] = {
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden_size": 40,
        "mrope_sections": (2, 1, 1),
    }
    return replace(_with_language(Qwen3VLPreset(**_SHARED | settings | changes)), vision=_qwen3_vl_encoder(vision))


def smallest_qwen3_vl_moe(*, vision: dict[str, Any] | None = None, **changes: Any) -> MindVLConfig:
    """The same with eight experts in every layer, two per token."""
    settings: dict[str, Any] = {
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden_size": 40,
        "mrope_sections": (2, 1, 1),
        "num_experts": 8,
        "experts_per_token": 2,
        "expert_ffn_hidden_size": 12,
    }
    return replace(_with_language(Qwen3VLMoEPreset(**_SHARED | settings | changes)), vision=_qwen3_vl_encoder(vision))


def _qwen3_vl_encoder(changes: dict[str, Any] | None) -> VisionConfig:
    settings: dict[str, Any] = {
        "hidden_size": 16,
        "num_layers": 3,
        "num_heads": 2,
        "ffn_hidden_size": 24,
        "num_position_embeddings": 49,
        "deepstack_layers": (0, 1),
        "init_std": 0.1,
    }
    return VisionConfig(kind="qwen3_vl", **settings | (changes or {}))


def random_qwen2_5_vl(config: MindVLConfig, *, seed: int = 0) -> Any:
    """Make a model of a class of transformers, such as Qwen2.5-VL, with random parameters, including norms and biases."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(**hf_config(config, torch.float32)), experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 and parameter.mean() == 1 else 0.15 * noise)
    return model.eval()


def save_qwen2_5_vl(config: MindVLConfig, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Save the model of `random_qwen2_5_vl` as a transformers directory and return it."""
    model = random_qwen2_5_vl(config, seed=seed).to(dtype)
    model.save_pretrained(directory)
    return model


def published_pair(config: MindVLConfig, make_model: Callable[..., Any], directory: Path, **options: Any) -> Any:
    """(MindVLModel, transformers model) with the same random weights, written to `directory`; `options`: dtype."""
    published = save_qwen2_5_vl(config, directory, **options)
    model = make_model(config, seed=9, **options)
    load_hf_directory(model, config, directory)
    return model, published
