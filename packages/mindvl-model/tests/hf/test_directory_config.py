# SPDX-License-Identifier: Apache-2.0
"""Configurations of transformers directories are read; errors name unknown keys and unsupported values."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from mindvl_model import WeightError, named_config
from mindvl_model.families.registry import write_language
from mindvl_model.hf.config_json import hf_config
from mindvl_model.hf.directory_config import config_from_directory, language_config_from_directory
from mindvl_model.testing.tiny import random_qwen2_5_vl, smallest_config, smallest_qwen2_5_vl

# config.json of Qwen2.5-VL-7B-Instruct as it was published: the decoder's keys at the top, no text_config.
PUBLISHED_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}


def write(directory: Path, document: Any, name: str = "config.json") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps(document))
    return directory


def test_the_published_7b_equals_the_named_size(tmp_path: Path) -> None:
    assert config_from_directory(write(tmp_path, PUBLISHED_7B)) == named_config("qwen2.5-vl-7b")


def test_keys_left_out_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    kept = {"hidden_size", "out_hidden_size", "in_chans", "tokens_per_second"}
    short = {name: value for name, value in PUBLISHED_7B["vision_config"].items() if name in kept}
    document = PUBLISHED_7B | {"vision_config": short}
    assert config_from_directory(write(tmp_path, document)) == named_config("qwen2.5-vl-7b")


@pytest.mark.parametrize("name", ["qwen2.5-vl-3b", "qwen2.5-vl-32b", "qwen2.5-vl-72b", "mindvl-8b", "mindvl-671b-a37b"])
def test_named_sizes_come_back_from_what_we_write(tmp_path: Path, name: str) -> None:
    config = named_config(name)
    assert config_from_directory(write(tmp_path, hf_config(config, torch.bfloat16))) == config


@pytest.mark.parametrize(
    ("version", "kind"),
    [("4.41.2", "mrope_all_axes"), ("4.57.6", "mrope_all_axes"), ("5.2.0", "mrope_all_axes"), ("5.3.0", "mrope"),
     ("5.23.0.dev0", "mrope"), ("6.0", "mrope"), (None, "mrope")],
)  # fmt: skip
def test_the_version_that_saved_a_directory_decides_where_text_continues_after_a_video(
    tmp_path: Path, version: str | None, kind: str
) -> None:
    config = config_from_directory(write(tmp_path, PUBLISHED_7B | {"transformers_version": version}))
    assert config.position_kind == kind
    again = write(tmp_path / "again", hf_config(config, torch.bfloat16))
    assert config_from_directory(again).position_kind == kind


def test_an_invalid_transformers_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"config.json: transformers_version='main' is not a version"):
        config_from_directory(write(tmp_path, PUBLISHED_7B | {"transformers_version": "main"}))


def test_weights_in_fp8_do_not_change_the_model(tmp_path: Path) -> None:
    document = PUBLISHED_7B | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert config_from_directory(write(tmp_path, document)) == named_config("qwen2.5-vl-7b")


def test_a_configuration_saved_by_transformers_5_gives_the_same_model(tmp_path: Path) -> None:
    config = smallest_qwen2_5_vl(tie_embeddings=True)
    random_qwen2_5_vl(config).config.save_pretrained(tmp_path)
    assert "text_config" in json.loads((tmp_path / "config.json").read_text())
    assert config_from_directory(tmp_path) == config


def test_a_second_copy_of_the_decoder_keys_must_be_equal(tmp_path: Path) -> None:
    """As some versions of transformers 4 saved the model: at the top level as published, and in text_config."""
    outside = {"model_type", "vision_config", "architectures", "transformers_version", "torch_dtype"}
    text = {name: value for name, value in PUBLISHED_7B.items() if name not in outside and "token_id" not in name}
    text |= {"model_type": "qwen2_5_vl_text", "sliding_window": None, "layer_types": ["full_attention"] * 28}
    text["rope_scaling"] = {"type": "default", "rope_type": "default", "mrope_section": [16, 24, 24]}
    document = PUBLISHED_7B | {"text_config": text}
    assert config_from_directory(write(tmp_path, document)) == named_config("qwen2.5-vl-7b")
    with pytest.raises(WeightError, match="the keys of the decoder at the top level differ from those in text_config"):
        config_from_directory(write(tmp_path, document | {"num_hidden_layers": 27}))


def test_full_attention_layers_that_do_not_exist_have_no_effect(tmp_path: Path) -> None:
    """transformers writes its default, 7, 15, 23 and 31, for an encoder with fewer layers."""
    shallow = PUBLISHED_7B | {"vision_config": PUBLISHED_7B["vision_config"] | {"depth": 8}}
    assert config_from_directory(write(tmp_path, shallow)).vision.full_attention_layers == (7,)
    shallow["vision_config"]["depth"] = 7
    assert config_from_directory(write(tmp_path, shallow)).vision.full_attention_layers == ()


def test_norms_and_pixels_come_back_with_their_numbers(tmp_path: Path) -> None:
    config = smallest_qwen2_5_vl()
    vision = replace(config.vision, image_mean=(0.5, 0.4, 0.3), image_std=(0.1, 0.2, 0.25))
    config = replace(config, vision=vision, language=replace(config.language, norm_epsilon=1e-5))
    write(tmp_path, hf_config(config, torch.float32))
    pixels = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.1, 0.2, 0.25], "merge_size": 2}
    write(tmp_path, pixels, "preprocessor_config.json")
    assert config_from_directory(tmp_path) == config
    write(tmp_path, pixels | {"patch_size": 16}, "preprocessor_config.json")
    with pytest.raises(
        WeightError, match=r"preprocessor_config.json: patch_size=16, but config.json has patch_size=14"
    ):
        config_from_directory(tmp_path)


def test_the_configuration_of_a_language_model_is_read(tmp_path: Path) -> None:
    language = smallest_config().language
    text = hf_config(smallest_config(), torch.float32)["text_config"]
    Qwen3Config(**text).save_pretrained(tmp_path)
    assert language_config_from_directory(tmp_path) == language
    with pytest.raises(WeightError, match=r"config.json: model_type='qwen3' .*or name it in init.language of a recipe"):
        config_from_directory(tmp_path)
    whole = language_config_from_directory(write(tmp_path / "whole", PUBLISHED_7B))
    assert whole == named_config("qwen2.5-vl-7b").language
    with pytest.raises(
        WeightError, match="model_type='gemma' is not supported, only qwen2, qwen3, qwen3_moe, deepseek_v3, llama"
    ):
        language_config_from_directory(write(tmp_path / "other", PUBLISHED_7B | {"model_type": "gemma"}))


def changed(**changes: Any) -> Callable[[], Any]:
    return lambda: PUBLISHED_7B | changes


def changed_vision(**changes: Any) -> Callable[[], Any]:
    return lambda: PUBLISHED_7B | {"vision_config": PUBLISHED_7B["vision_config"] | changes}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            dict,
            "model_type=None is not supported as a whole model, only mindvl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe are",
        ),
        (list, r"config.json: must be a JSON object, got \[\]"),
        (
            changed(model_type="llama"),
            r"as a whole model, .* are. Combine .*: mindvl convert --vision DIRECTORY --lang",
        ),
        (changed(model_type="llava"), "model_type='llava' is not supported as a whole model"),
        (changed(vision_config=None), "vision_config: must be a JSON object, got None"),
        (changed(vision_config="gone"), "vision_config: must be a JSON object, got 'gone'"),
        (changed(hidden_size="3584"), "hidden_size='3584' is not supported; it must be an integer above 0"),
        (changed(num_hidden_layers=-1), "num_hidden_layers=-1 is not supported; it must be an integer above 0"),
        (changed(num_key_value_heads=5), "config.json: num_heads: must be a multiple of num_kv_heads=5, got 28"),
        (changed(rope_scaling=None), "mrope_section=None is not supported; it must be a list of 3 integers >= 0"),
        (changed(rope_scaling={"type": "yarn", "factor": 4.0}), r"type 'yarn' with \['factor'\]"),
        (changed(rope_scaling={"type": "mrope", "mrope_section": [8, 8, 8]}), "mrope_sections: .* add up to 24"),
        (
            changed(use_sliding_window=True, max_window_layers=0, sliding_window=4096),
            "sliding_window=4096 is not supported, because it is narrower than max_position_embeddings=128000",
        ),
        (changed(hidden_act="gelu"), "hidden_act='gelu' is not supported, only 'silu'"),
        (changed(quantization_config={"quant_method": "awq"}), "quantization_config=.*awq.* is not supported"),
        (
            changed(layer_types=["sliding_attention"]),
            r"layer_types=\['sliding_attention'\] is not supported; it must be a list of full_attention",
        ),
        (changed(residual_scale=2), r"key 'residual_scale' \(2\) is unknown"),
        (
            changed(image_token_id=200000),
            r"tokens.image: must be an id below vocab_size=152064, got 200000\. .*this model is not supported",
        ),
        (changed(eos_token_id=None), "eos_token_id is missing"),
        (changed_vision(temporal_patch_size=1), "config.json: temporal_patch_size: must be 2"),
        (changed_vision(tokens_per_second=4), "tokens_per_second=4 is not supported, only 2"),
        (changed_vision(rotary="3d"), r"config.json: vision_config: key 'rotary' \('3d'\) is unknown"),
        (changed_vision(window_size=100), "config.json: window_size: must be a multiple of"),
        (
            changed_vision(out_hidden_size=4096),
            "out_hidden_size=4096 is not supported; it must be the hidden_size of the language model, 3584",
        ),
    ],
)
def test_unknown_keys_and_values_are_refused_with_file_and_key(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(WeightError, match=message) as caught:
        config_from_directory(write(tmp_path, document()))
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_directory_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"config.json: does not exist"):
        config_from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(WeightError, match=r"config.json: not valid JSON"):
        config_from_directory(tmp_path)


def test_keys_of_other_tasks_do_not_matter(tmp_path: Path) -> None:
    text = write_language(smallest_config().language)
    more = {"temperature": 1.0, "top_k": 50, "is_decoder": False, "pruned_heads": {}, "unset": None, "mlp_bias": False}
    for name, document in (("plain", text), ("more", text | more), ("other", text | {"mlp_bias": True})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(document))
    plain = language_config_from_directory(tmp_path / "plain")
    assert language_config_from_directory(tmp_path / "more") == plain
    with pytest.raises(WeightError, match="mlp_bias=True is not supported"):
        language_config_from_directory(tmp_path / "other")
