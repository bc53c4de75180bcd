# SPDX-License-Identifier: Apache-2.0
"""Adapters written as a PEFT directory give peft the same logits without mindvl, and are read back unchanged."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from mindvl_model import MindVLConfig, WeightError
from mindvl_model.adapters import LoRAConfig
from mindvl_model.adapters.peft_directory import PeftDirectory, write_peft_directory
from mindvl_model.hf.export import export_hf_directory
from mindvl_model.hf.inputs import hf_inputs, pack_for
from mindvl_model.hf.pretrained import from_pretrained
from mindvl_model.hf.processor_files import ProcessorSettings
from mindvl_model.megatron.adapters import add_adapters, fill_adapters, is_adapter
from mindvl_model.parameters import PARTS, Part
from mindvl_model.random_inputs import random_segment
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
}


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
                parameter.data.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
        held = {name: parameter.detach() for name, parameter in model.named_parameters()}
        write_peft_directory(tmp_path / "adapter", config, lora, parts, held.__getitem__, base=tmp_path / "base")
        return model

    return make


def base_model(directory: Path) -> Any:
    return from_pretrained(AutoModelForImageTextToText, directory, trust_remote_code=True, dtype=torch.float32).eval()


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_peft_on_the_published_base_gives_the_logits_of_the_adapted_model(
    adapted: Any, tmp_path: Path, case: str
) -> None:
    config, lora, parts = CASES[case]
    model = adapted(config, lora, parts)
    segment = random_segment(config, [(1, 4, 6), (1, 8, 4)], num_text=20, seed=1)
    base, inputs = base_model(tmp_path / "base"), hf_inputs(segment, config)
    logits = model.logits(**pack_for(base, [segment], config))
    before = base(**inputs).logits[0]
    expected = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(**inputs).logits[0]
    assert (logits - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    assert (before - expected).abs().max() > 1e-2


@pytest.mark.parametrize("case", CASES)
def test_adapters_are_read_back_unchanged(adapted: Any, make_model: Any, tmp_path: Path, case: str) -> None:
    config, lora, parts = CASES[case]
    written = dict(adapted(config, lora, parts).named_parameters())
    model = make_model(config)
    add_adapters(model, config, lora, parts)
    directory = PeftDirectory(tmp_path / "adapter")
    directory.check(config, lora, parts)
    fill_adapters(model, directory)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            assert torch.equal(parameter, written[name]), name


@pytest.mark.parametrize("case", ["some of Qwen2.5-VL", "down_proj of Qwen3-MoE, rsLoRA"])
@torch.no_grad()
def test_an_adapter_that_peft_made_starts_a_model(adapted: Any, make_model: Any, tmp_path: Path, case: str) -> None:
    config, lora, parts = CASES[case]
    model = adapted(config, lora, parts)
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    settings = {
        name: written[name] for name in ("r", "lora_alpha", "use_rslora", "target_modules", "target_parameters")
    }
    wrapped = get_peft_model(base_model(tmp_path / "base"), LoraConfig(init_lora_weights=False, **settings)).eval()
    wrapped.save_pretrained(tmp_path / "of-peft")
    directory = PeftDirectory(tmp_path / "of-peft")
    directory.check(config, lora, parts)
    fill_adapters(model, directory)
    segment = random_segment(config, [(1, 4, 6)], num_text=20, seed=1)
    expected = wrapped(**hf_inputs(segment, config)).logits[0]
    logits = model.logits(**pack_for(wrapped.get_base_model(), [segment], config))
    assert (logits - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_adapters_with_other_rank_scaling_or_layers_are_refused(adapted: Any, tmp_path: Path) -> None:
    config, lora, parts = CASES["some of Qwen2.5-VL"]
    adapted(config, lora, parts)
    directory = PeftDirectory(tmp_path / "adapter")
    for change, message in (
        ({"rank": 8}, r"adapters have rank 4, but the recipe has 8\. Set adapter\.rank=4"),
        ({"alpha": 8.0}, r"adapters have alpha 7, but the recipe has 8\.0"),
        ({"rslora": False}, "adapters have rslora True"),
        (
            {"targets": (*lora.targets, "k_proj")},
            r"has no adapter for model\.language_model\.layers\.0\.self_attn\.k_proj",
        ),
        ({"targets": lora.targets[1:]}, r"has adapters for layers that are not targets: model\.language_model"),
    ):
        with pytest.raises(WeightError, match=message):
            directory.check(config, replace(lora, **change), parts)


def test_damaged_directories_and_other_kinds_of_adapters_are_refused(adapted: Any, tmp_path: Path) -> None:
    config, lora, parts = CASES["some of Qwen2.5-VL"]
    adapted(config, lora, parts)
    source = tmp_path / "adapter"

    def changed(name: str, **changes: Any) -> Path:
        copy = tmp_path / name
        shutil.copytree(source, copy)
        document = json.loads((copy / "adapter_config.json").read_text()) | changes
        (copy / "adapter_config.json").write_text(json.dumps(document))
        return copy

    with pytest.raises(WeightError, match="describes no LoRA adapter"):
        PeftDirectory(changed("ia3", peft_type="IA3"))
    with pytest.raises(WeightError, match="use_dora=True is not supported"):
        PeftDirectory(changed("dora", use_dora=True))
    cut = changed("cut")
    content = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightError, match=r"adapter_model\.safetensors: cannot be read"):
        PeftDirectory(cut)
    other = changed("other")
    tensors = load_file(other / "adapter_model.safetensors")
    save_file(tensors | {"base_model.model.lm_head.weight": torch.ones(2)}, other / "adapter_model.safetensors")
    with pytest.raises(WeightError, match=r"'base_model\.model\.lm_head\.weight' is no matrix of LoRA"):
        PeftDirectory(other)


def test_an_existing_directory_is_not_overwritten(adapted: Any, tmp_path: Path) -> None:
    config, lora, parts = CASES["some of Qwen2.5-VL"]
    adapted(config, lora, parts)
    with pytest.raises(WeightError, match="adapter: already exists"):
        write_peft_directory(tmp_path / "adapter", config, lora, parts, {}.__getitem__, base=None)
