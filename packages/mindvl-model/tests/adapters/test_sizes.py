# SPDX-License-Identifier: Apache-2.0
"""Counts of adapter parameters equal those of models on the meta device."""

from collections import Counter

import pytest
import torch

from mindvl_model import MindVLConfig, named_config
from mindvl_model.adapters import LoRAConfig
from mindvl_model.adapters.sizes import adapter_parameters
from mindvl_model.megatron.adapters import add_adapters, is_adapter
from mindvl_model.model import MindVLModel
from mindvl_model.parallel_config import BuildConfig
from mindvl_model.parameters import parameter_group
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen2_5_vl, smallest_qwen3_moe


@pytest.mark.parametrize(
    "config",
    [
        smallest_config(),
        smallest_qwen2_5_vl(),
        smallest_qwen3_moe(),
        smallest_deepseek_v3(),
        smallest_deepseek_v3(q_lora_rank=None),
        named_config("mindvl-8b"),
    ],
    ids=["Qwen3", "Qwen2", "Qwen3-MoE", "DeepSeek-V3", "whole queries", "mindvl-8b"],
)
@pytest.mark.parametrize("targets", [("all-linear",), ("o_proj", "up_proj", "mlp.2", "qkv")])
def test_counts_are_those_of_the_model(config: MindVLConfig, targets: tuple[str, ...]) -> None:
    lora = LoRAConfig(rank=3, targets=targets)
    with torch.device("meta"):
        model = MindVLModel(config, BuildConfig())
        add_adapters(model, config, lora)
    found: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        found[parameter_group(name)] += parameter.numel() * is_adapter(name)
    assert adapter_parameters(config, lora) == dict(found)


def test_rank_16_on_all_linear_layers_of_the_8b_language_model_by_hand() -> None:
    """Qwen3-8B: 36 layers of 4096 features, 32 heads and 8 key-value heads of 128, 12288 in the MLP."""
    attention = 2 * (4096 + 4096) + 2 * (4096 + 1024)
    layer = attention + 3 * (4096 + 12288)
    found = adapter_parameters(named_config("mindvl-8b"), LoRAConfig(rank=16), ["language"])
    assert found == {"language": 36 * 16 * layer}
