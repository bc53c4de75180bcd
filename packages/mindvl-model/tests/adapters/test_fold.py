# SPDX-License-Identifier: Apache-2.0
"""A model with folded adapters has the weights that peft merges."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, Qwen2_5_VLForConditionalGeneration

from mindvl_model import WeightError
from mindvl_model.adapters.fold import fold_adapter
from mindvl_model.hf.export import export_hf_directory
from mindvl_model.hf.pretrained import from_pretrained
from mindvl_model.hf.processor_files import ProcessorSettings
from mindvl_model.testing.tiny import smallest_qwen2_5_vl, smallest_qwen3_moe


@pytest.mark.parametrize(
    "name", ["Qwen2.5-VL", "Qwen3-MoE", "down_proj of Qwen3-MoE", "DoRA", "other ranks and scalings"]
)
def test_folded_weights_are_those_that_peft_merges(
    make_model: Any, tokenizer_directory: Path, tmp_path: Path, name: str
) -> None:
    config = smallest_qwen3_moe(vocab_size=270) if "MoE" in name else smallest_qwen2_5_vl(vocab_size=270)
    base, sizes = tmp_path / "base", ProcessorSettings(min_pixels=28 * 28, max_pixels=56 * 84)
    export_hf_directory(make_model(config), config, base, tokenizer=tokenizer_directory, processor=sizes)
    model = from_pretrained(AutoModelForImageTextToText, base, trust_remote_code=True, dtype=torch.float32)
    parameters = {
        "Qwen3-MoE": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "down_proj of Qwen3-MoE": ["mlp.experts.down_proj"],
    }.get(name)
    targets = ["q_proj", "attn.qkv", "merger.mlp.2", *([] if "MoE" in name else ["up_proj"])]
    changes: dict[str, Any] = {"use_dora": name == "DoRA"}
    if name == "other ranks and scalings":
        changes = {"rank_pattern": {"layers.0.self_attn.q_proj": 5}, "alpha_pattern": {".*up_proj": 9}}
        changes |= {"layers_to_transform": [0], "layers_pattern": "layers", "use_rslora": True}
        targets = targets[:1] + targets[3:]
    settings = LoraConfig(
        r=3, lora_alpha=5, target_modules=targets, target_parameters=parameters, init_lora_weights=False, **changes
    )
    wrapped = get_peft_model(model, settings)
    wrapped.save_pretrained(tmp_path / "adapter")
    num_changed = fold_adapter(base, tmp_path / "adapter", tmp_path / "folded")
    wrapped.merge_and_unload().save_pretrained(tmp_path / "merged")
    expected, folded = (
        load_file(tmp_path / "merged" / "model.safetensors"),
        load_file(tmp_path / "folded" / "model.safetensors"),
    )
    before = load_file(base / "model.safetensors")
    assert num_changed == sum(not torch.equal(folded[one], before[one]) for one in folded)
    again = from_pretrained(
        AutoModelForImageTextToText, tmp_path / "folded", trust_remote_code=True, dtype=torch.float32
    )
    for one, parameter in wrapped.get_base_model().named_parameters():
        torch.testing.assert_close(again.get_parameter(one), parameter, rtol=1e-5, atol=1e-6)
    assert len(expected) > 0
    assert (tmp_path / "folded" / "tokenizer.json").is_file()


def test_an_adapter_of_another_model_is_refused(make_model: Any, tokenizer_directory: Path, tmp_path: Path) -> None:
    config, sizes = smallest_qwen2_5_vl(vocab_size=270), ProcessorSettings(min_pixels=28 * 28, max_pixels=56 * 84)
    export_hf_directory(make_model(config), config, tmp_path / "base", tokenizer=tokenizer_directory, processor=sizes)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "base")
    wrapped = get_peft_model(model, LoraConfig(r=3, target_modules=["patch_embed.proj"]))
    assert isinstance(wrapped, PeftModel)
    wrapped.save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        WeightError, match=r"has an adapter for model.visual.patch_embed.proj, which is no linear layer"
    ):
        fold_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "folded")
    with pytest.raises(WeightError, match="base: already exists"):
        fold_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "base")
