# SPDX-License-Identifier: Apache-2.0
"""Targets by published name: suffixes as in PEFT, all-linear, parts, experts, and names that match nothing."""

import pytest

from mindvl_model import ModelError
from mindvl_model.adapters import LoRAConfig
from mindvl_model.adapters.targets import find_targets, published_layers
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen3_moe

QWEN3 = smallest_config()


def test_a_name_selects_its_layers_in_all_trained_parts() -> None:
    found = find_targets(QWEN3, LoRAConfig(targets=("up_proj", "k_proj")))
    layers = {layer: [target.published[index] for index in target.chosen] for layer, target in found.items()}
    assert layers == {
        "vision.blocks.layers.0.mlp.linear_fc1": ["model.visual.blocks.0.mlp.up_proj"],
        "vision.blocks.layers.1.mlp.linear_fc1": ["model.visual.blocks.1.mlp.up_proj"],
        "language.decoder.layers.0.self_attention.linear_qkv": ["model.language_model.layers.0.self_attn.k_proj"],
        "language.decoder.layers.0.mlp.linear_fc1": ["model.language_model.layers.0.mlp.up_proj"],
        "language.decoder.layers.1.self_attention.linear_qkv": ["model.language_model.layers.1.self_attn.k_proj"],
        "language.decoder.layers.1.mlp.linear_fc1": ["model.language_model.layers.1.mlp.up_proj"],
    }
    assert len(find_targets(QWEN3, LoRAConfig(targets=("up_proj",)), ["vision"])) == 2


def test_all_linear_has_every_layer_but_embedding_output_layer_and_routers() -> None:
    names = published_layers(smallest_qwen3_moe(), ["language"])
    layer = "model.language_model.layers.1."
    own = {name.removeprefix(layer) for name in names if name.startswith(layer)}
    experts = {f"mlp.experts.{expert}.{name}_proj" for expert in range(8) for name in ("gate", "up", "down")}
    assert own == {*(f"self_attn.{name}_proj" for name in "qkvo"), *experts}
    assert published_layers(QWEN3, ["projector"]) == ["model.visual.merger.mlp.0", "model.visual.merger.mlp.2"]


def test_multi_token_prediction_gets_no_adapters() -> None:
    assert not any("layers.3." in name for name in published_layers(smallest_deepseek_v3()))  # three decoder layers


def test_a_name_that_matches_nothing_is_refused_with_the_nearest_known_name() -> None:
    with pytest.raises(
        ModelError, match=r"'qproj' matches no linear layer .* Use 'q_proj', the nearest known name; known:"
    ):
        find_targets(QWEN3, LoRAConfig(targets=("qproj",)))
    with pytest.raises(ModelError, match=r"'q_proj' matches no linear layer of the trained parts"):
        find_targets(QWEN3, LoRAConfig(targets=("q_proj",)), ["vision"])


def test_single_experts_and_dropout_of_experts_are_refused() -> None:
    with pytest.raises(ModelError, match=r"selects some experts of language\.decoder\.layers\.0\.mlp\.experts"):
        find_targets(smallest_qwen3_moe(), LoRAConfig(targets=("experts.3.up_proj",)))
    with pytest.raises(ModelError, match=r"adapter\.dropout: is 0\.1, but the experts"):
        find_targets(smallest_qwen3_moe(), LoRAConfig(dropout=0.1), ["language"])
