# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL, dense and with experts, equals the transformers classes in logits and all gradients, in any size."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLMoeConfig
from transformers import Qwen3VLMoeForConditionalGeneration as Qwen3VLMoe

from mindvl_model import MindVLConfig, WeightError
from mindvl_model.hf.config_json import hf_config
from mindvl_model.hf.directory_config import config_from_directory
from mindvl_model.hf.inputs import pack_for
from mindvl_model.hf.load import load_hf_directory
from mindvl_model.testing.published import (
    SEGMENTS,
    assert_equals_published,
    make_segments,
    separate_calls,
)
from mindvl_model.testing.tiny import published_pair, save_qwen2_5_vl, smallest_qwen3_vl, smallest_qwen3_vl_moe

MODELS: dict[str, MindVLConfig] = {
    "dense": smallest_qwen3_vl(),
    "tied": smallest_qwen3_vl(tie_embeddings=True, vision={"deepstack_layers": (2, 0)}),
    "experts": smallest_qwen3_vl_moe(aux_loss_weight=0.0),  # the loss of transformers has no auxiliary loss either
    "other sizes": smallest_qwen3_vl_moe(
        aux_loss_weight=0.0,
        num_experts=6,
        experts_per_token=3,
        expert_ffn_hidden_size=24,  # equals hidden_size, so that a transposed tensor has the same shape
        head_dim=12,
        mrope_sections=(4, 1, 1),
        vision={"patch_size": 8, "num_layers": 5, "deepstack_layers": (0, 2, 3), "num_position_embeddings": 50},
    ),
    "no deepstack": smallest_qwen3_vl(vision={"deepstack_layers": (), "num_position_embeddings": 1}),
}


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest, make_model: Callable[..., Any], tmp_path: Path) -> tuple[Any, Any]:
    return published_pair(MODELS[request.param], make_model, tmp_path)


@pytest.mark.parametrize("kind", SEGMENTS)
def test_logits_and_gradients_are_those_of_transformers(pair: tuple[Any, Any], kind: str) -> None:
    assert_equals_published(*pair, kind)


def test_deepstack_features_matter(pair: tuple[Any, Any]) -> None:
    model, config = pair[0], pair[0].mindvl
    pack = pack_for(pair[1], make_segments(config, "an image"), config)
    logits = model.logits(**pack)
    if config.vision.deepstack_layers:
        with torch.no_grad():
            for merger in model.projector.deepstack.children():
                merger.fc2.weight.zero_()
                merger.fc2.bias.zero_()
        assert (model.logits(**pack) - logits).abs().max() > 1e-2 * logits.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_config_json_is_read_back(name: str, tmp_path: Path) -> None:
    config = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config, torch.float32)))
    read = config_from_directory(tmp_path)
    assert (read.vision.deepstack_layers, read.language.rope) == (config.vision.deepstack_layers, config.language.rope)
    assert read.language == config.language
    assert hf_config(read, torch.float32) == hf_config(config, torch.float32)


def test_sections_that_do_not_fill_a_head_are_those_that_take_effect(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    """The defaults of transformers are for heads of 128; smaller heads use a part of them."""
    document = hf_config(smallest_qwen3_vl(), torch.float32)
    document["text_config"]["rope_scaling"] = {"rope_type": "default"}
    published = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**document)).eval()
    published.save_pretrained(tmp_path)
    config = config_from_directory(tmp_path)
    assert config.language.rope.mrope_sections == (2, 1, 1)
    model = make_model(config, seed=3)
    load_hf_directory(model, config, tmp_path)
    segments = make_segments(config, "all of them packed")
    expected, _ = separate_calls(published, segments, config)
    logits = model.logits(**pack_for(published, segments, config))
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_experts_are_read_in_the_layout_of_published_directories(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    config = smallest_qwen3_vl_moe()
    published = save_qwen2_5_vl(config, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("experts.down_proj") and tensor.shape[1:] == (24, 12):
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, file, {"format": "pt"})
    model = make_model(config, seed=9)
    load_hf_directory(model, config, tmp_path)
    segments = make_segments(config, "text")
    expected, _ = separate_calls(published, segments, config)
    logits = model.logits(**pack_for(published, segments, config))
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("vision_config", {"hidden_act": "silu"}, r"vision_config: hidden_act='silu' is not supported"),
        ("vision_config", {"fullatt_block_indexes": [1]}, r"vision_config: key 'fullatt_block_indexes'"),
        ("vision_config", {"deepstack_visual_indexes": [1, 7]}, r"deepstack_layers: layers \[7\] do not exist"),
        ("vision_config", {"out_hidden_size": 48}, r"out_hidden_size=48 is not supported"),
        ("vision_config", {"model_type": "siglip"}, r"vision_config: model_type='siglip' is not supported"),
        ("text_config", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary embedding of type 'yarn'"),
        ("text_config", {"rope_scaling": {"mrope_interleaved": False}}, "mrope_interleaved=False is not supported"),
        ("text_config", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("text_config", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("text_config", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ],
)
def test_a_value_that_is_not_supported_is_refused_by_name(
    section: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    document = hf_config(smallest_qwen3_vl_moe(), torch.float32)
    document[section] |= changes
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(WeightError, match=message):
        config_from_directory(tmp_path)


def test_the_written_keys_make_the_classes_of_transformers() -> None:
    dense = Qwen3VLConfig(**hf_config(smallest_qwen3_vl(tie_embeddings=True), torch.float32))
    assert Qwen3VLForConditionalGeneration(dense).lm_head.weight.shape == (64, 24)
    experts = Qwen3VLMoe(Qwen3VLMoeConfig(**hf_config(smallest_qwen3_vl_moe(), torch.float32)))
    assert experts.model.visual.config.deepstack_visual_indexes == [0, 1]
    assert experts.model.language_model.config.num_experts == 8


def test_key_value_heads_that_are_null_are_as_many_as_query_heads(tmp_path: Path) -> None:
    document = hf_config(smallest_qwen3_vl(num_kv_heads=4), torch.float32)
    for value in (None, 4):
        document["text_config"]["num_key_value_heads"] = value
        (tmp_path / "config.json").write_text(json.dumps(document))
        assert config_from_directory(tmp_path).language == smallest_qwen3_vl(num_kv_heads=4).language
    del document["text_config"]["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(WeightError, match="num_heads: must be a multiple of num_kv_heads=32, got 4"):
        config_from_directory(tmp_path)
