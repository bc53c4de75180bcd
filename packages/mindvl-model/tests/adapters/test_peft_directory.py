# SPDX-License-Identifier: Apache-2.0
"""Adapters of PEFT directories are read unchanged, and other kinds of adapters are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from mindvl_model import WeightError
from mindvl_model.adapters.peft_directory import PeftDirectory
from mindvl_model.hf.inputs import hf_inputs, pack_for
from mindvl_model.megatron.adapters import add_adapters, fill_adapters, initialize_adapters, is_adapter
from mindvl_model.random_inputs import random_segment


def test_adapters_are_read_back_unchanged(adapted: Any, make_model: Any, tmp_path: Path, case: Any) -> None:
    config, lora, parts = case
    written = dict(adapted(config, lora, parts).named_parameters())
    model = make_model(config)
    add_adapters(model, config, lora, parts)
    directory = PeftDirectory(tmp_path / "adapter")
    directory.check(config, lora, parts)
    fill_adapters(model, directory)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            assert torch.equal(parameter, written[name]), name


@pytest.mark.parametrize("name", ["some of Qwen2.5-VL", "down_proj of Qwen3-MoE, rsLoRA", "DoRA of Qwen2.5-VL"])
@torch.no_grad()
def test_an_adapter_that_peft_made_starts_a_model(
    adapted: Any, base_model: Any, tmp_path: Path, cases: Any, name: str
) -> None:
    config, lora, parts = cases[name]
    model = adapted(config, lora, parts)
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    settings = {
        name: written[name]
        for name in ("r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "target_parameters")
    }
    wrapped = get_peft_model(base_model(), LoraConfig(init_lora_weights=False, **settings)).eval()
    wrapped.save_pretrained(tmp_path / "of-peft")
    directory = PeftDirectory(tmp_path / "of-peft")
    directory.check(config, lora, parts)
    fill_adapters(model, directory)
    segment = random_segment(config, [(1, 4, 6)], num_text=20, seed=1)
    expected = wrapped(**hf_inputs(segment, config)).logits[0]
    logits = model.logits(**pack_for(wrapped.get_base_model(), [segment], config))
    assert (logits - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_adapters_with_other_rank_scaling_or_layers_are_refused(adapted: Any, tmp_path: Path, cases: Any) -> None:
    config, lora, parts = cases["some of Qwen2.5-VL"]
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


def test_an_adapter_of_a_base_model_with_other_sizes_is_refused(adapted: Any, tmp_path: Path, cases: Any) -> None:
    config, lora, parts = cases["language of Qwen3"]
    adapted(config, lora, parts)
    wider = replace(config, language=replace(config.language, ffn_hidden_size=48))
    with pytest.raises(WeightError, match=r"gate_proj has 24 inputs and 40 outputs, but the layer has 24 and 48"):
        PeftDirectory(tmp_path / "adapter").check(wider, lora, parts)


@torch.no_grad()
def test_layers_of_other_ranks_and_scalings_start_a_model_of_the_largest_rank(
    adapted: Any, base_model: Any, make_model: Any, tmp_path: Path, cases: Any
) -> None:
    config, lora, parts = cases["Qwen3-MoE"]
    adapted(config, lora, parts)
    settings = LoraConfig(
        r=3,
        lora_alpha=6,
        use_rslora=True,
        init_lora_weights=False,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj"],
        rank_pattern={r"layers\.1\.self_attn\.o_proj": 2, "mlp.experts.gate_up_proj": 7},
        alpha_pattern={"q_proj": 4},
    )
    wrapped = get_peft_model(base_model(), settings).eval()
    wrapped.save_pretrained(tmp_path / "of-peft")
    directory = PeftDirectory(tmp_path / "of-peft")
    lora = replace(lora, rank=7, alpha=5, targets=("q_proj", "o_proj", "gate_proj", "up_proj"))
    for change, message in (
        ({"rank": 3}, r"adapters have rank 7, but the recipe has 3\. Set adapter\.rank=7"),
        ({"dora": True, "targets": lora.targets[:2]}, "has adapters for layers that are not targets"),
    ):
        with pytest.raises(WeightError, match=message):
            directory.check(config, replace(lora, **change), ["language"])
    directory.check(config, lora, ["language"])
    model = make_model(config)
    add_adapters(model, config, lora, ["language"])
    initialize_adapters(model, seed=1)
    fill_adapters(model, directory)
    segment = random_segment(config, num_text=20, seed=1)
    expected = wrapped(**hf_inputs(segment, config)).logits[0]
    logits = model.logits(**pack_for(wrapped.get_base_model(), [segment], config))
    assert (logits - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_damaged_directories_and_other_kinds_of_adapters_are_refused(adapted: Any, tmp_path: Path, cases: Any) -> None:
    config, lora, parts = cases["some of Qwen2.5-VL"]
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
    for name, changes, message in (
        ("dora", {"use_dora": True}, r"adapter of model\..* is not complete"),
        ("head", {"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported\. .* with PEFT"),
        ("bias", {"bias": "lora_only"}, "bias='lora_only' is not supported"),
        ("unknown", {"use_new_variant": True}, "use_new_variant=True is not supported"),
        (
            "pissa",
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights='pissa_niter_4' changed the base model too",
        ),
        ("rank", {"r": None}, "r must be an integer > 0, got None"),
        ("alpha", {"lora_alpha": -1}, "lora_alpha must be a finite number > 0, got -1"),
        ("pattern", {"rank_pattern": {"(": 3}}, r"rank_pattern: '\(' is not a regular expression"),
    ):
        with pytest.raises(WeightError, match=message):
            PeftDirectory(changed(name, **changes))
    pickled = changed("pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(WeightError, match=r"does not exist, but adapter_model\.bin\. Load the adapter with PEFT"):
        PeftDirectory(pickled)
    cut = changed("cut")
    content = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightError, match=r"adapter_model\.safetensors: cannot be read"):
        PeftDirectory(cut)
    other = changed("other")
    tensors = load_file(other / "adapter_model.safetensors")
    save_file(tensors | {"base_model.model.lm_head.weight": torch.ones(2)}, other / "adapter_model.safetensors")
    with pytest.raises(WeightError, match=r"'base_model\.model\.lm_head\.weight' is no matrix of a linear layer"):
        PeftDirectory(other)
