# SPDX-License-Identifier: Apache-2.0
"""Models with random adapters, and the directories of their base models and adapters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from mindvl_model import MindVLConfig
from mindvl_model.adapters import LoRAConfig
from mindvl_model.adapters.peft_export import write_peft_directory
from mindvl_model.hf.export import export_hf_directory
from mindvl_model.hf.pretrained import from_pretrained
from mindvl_model.hf.processor_files import ProcessorSettings
from mindvl_model.megatron.adapters import add_adapters, is_adapter
from mindvl_model.parameters import PARTS, Part
from mindvl_model.testing.tiny import (
    smallest_config,
    smallest_deepseek_v3,
    smallest_qwen2_5_vl,
    smallest_qwen3_moe,
)

CASES: dict[str, tuple[MindVLConfig, LoRAConfig, tuple[Part, ...]]] = {
    "all of Qwen2.5-VL": (smallest_qwen2_5_vl(vocab_size=270), LoRAConfig(rank=3, alpha=6), PARTS),
    "some of Qwen2.5-VL": (
        smallest_qwen2_5_vl(vocab_size=270),
        LoRAConfig(rank=4, alpha=7, rslora=True, targets=("q_proj", "v_proj", "attn.proj", "down_proj", "mlp.0")),
        ("vision", "projector", "language"),
    ),
    "language of Qwen3": (smallest_config(vocab_size=270), LoRAConfig(rank=3, alpha=6), ("language",)),
    "Qwen3-MoE": (smallest_qwen3_moe(vocab_size=270), LoRAConfig(rank=3, alpha=6), PARTS),
    "down_proj of Qwen3-MoE, rsLoRA": (
        smallest_qwen3_moe(vocab_size=270),
        LoRAConfig(rank=3, alpha=6, rslora=True, targets=("down_proj", "q_proj")),
        ("language",),
    ),
    "up_proj and gate_proj of Qwen3-MoE, rsLoRA": (
        smallest_qwen3_moe(vocab_size=270),
        LoRAConfig(rank=3, alpha=6, rslora=True, targets=("up_proj", "gate_proj")),
        ("language",),
    ),
    "up_proj of DeepSeek-V3": (
        smallest_deepseek_v3(vocab_size=270, num_mtp_layers=0),
        LoRAConfig(rank=3, alpha=6, targets=("up_proj", "kv_b_proj", "q_a_proj")),
        PARTS,
    ),
    "DeepSeek-V3": (smallest_deepseek_v3(vocab_size=270, num_mtp_layers=0), LoRAConfig(rank=3, alpha=6), PARTS),
    "DoRA of Qwen2.5-VL": (smallest_qwen2_5_vl(vocab_size=270), LoRAConfig(rank=3, alpha=6, dora=True), PARTS),
    "DoRA of some layers of Qwen3": (
        smallest_config(vocab_size=270),
        LoRAConfig(rank=3, alpha=6, dora=True, rslora=True, targets=("v_proj", "gate_proj", "attn.proj", "mlp.2")),
        PARTS,
    ),
    "DoRA of latent attention": (
        smallest_deepseek_v3(vocab_size=270, num_mtp_layers=0),
        LoRAConfig(
            rank=3, alpha=6, dora=True, targets=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
        ),
        PARTS,
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[MindVLConfig, LoRAConfig, tuple[Part, ...]]:
    """A model, its adapters, and the parts that have some."""
    return CASES[request.param]


@pytest.fixture
def cases() -> dict[str, tuple[MindVLConfig, LoRAConfig, tuple[Part, ...]]]:
    return CASES


@pytest.fixture
def adapted(make_model: Any, tokenizer_directory: Path, tmp_path: Path) -> Callable[..., Any]:
    """A model with random adapters, its base as a transformers directory, and the adapters as a PEFT directory."""

    def make(config: MindVLConfig, lora: LoRAConfig, parts: tuple[Part, ...]) -> Any:
        model = make_model(config)
        export_hf_directory(
            model,
            config,
            tmp_path / "base",
            tokenizer=tokenizer_directory,
            processor=ProcessorSettings(min_pixels=28 * 28, max_pixels=56 * 84),
        )
        add_adapters(model, config, lora, parts)
        generator = torch.Generator().manual_seed(5)
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                noise = 0.15 * torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(1 + noise if name.endswith(".M") else noise)
        held = {name: parameter.detach() for name, parameter in model.named_parameters()}
        write_peft_directory(tmp_path / "adapter", config, lora, parts, held.__getitem__, base=tmp_path / "base")
        return model

    return make


@pytest.fixture
def base_model(tmp_path: Path) -> Callable[[], Any]:
    """Loads the base model of `adapted` in transformers."""

    def load() -> Any:
        loaded = from_pretrained(
            AutoModelForImageTextToText, tmp_path / "base", trust_remote_code=True, dtype=torch.float32
        )
        return loaded.eval()

    return load
