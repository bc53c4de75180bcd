# SPDX-License-Identifier: Apache-2.0
"""Weights are written to a directory and read back; other directories are read, damaged ones raise errors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen3ForCausalLM

from mindvl_model import WeightError
from mindvl_model.hf.config_json import hf_config
from mindvl_model.hf.load import load_hf_directory
from mindvl_model.testing.tiny import smallest_config
from mindvl_model.weights.directory import WeightDirectory, write_weights
from mindvl_model.weights.names import canonical_name, weight_rules

CONFIG = smallest_config()


def write_directory(model: Any, directory: Path, shard_bytes: int = 1 << 30) -> Path:
    """Write only the files that loading reads: weights and config.json."""
    directory.mkdir()
    parameters = dict(model.named_parameters())
    tensors = [
        pair
        for rule in weight_rules(model.mindvl)
        for pair in zip(rule.hf_names, rule.split(parameters[rule.param_name].detach()), strict=True)
    ]
    write_weights(directory, tensors, shard_bytes)
    (directory / "config.json").write_text(json.dumps(hf_config(model.mindvl, torch.float32)))
    return directory


def assert_same(model: Any, other: Any, parts: tuple[str, ...] = ("vision", "projector", "language")) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)) == (name.split(".")[0] in parts), name


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_rules_cover_exactly_the_parameters_of_the_model(make_model: Callable[..., Any], tie_embeddings: bool) -> None:
    config = smallest_config(tie_embeddings=tie_embeddings)
    rules = weight_rules(config)
    assert sorted(rule.param_name for rule in rules) == sorted(
        name for name, _ in make_model(config).named_parameters()
    )
    names = [name for rule in rules for name in rule.hf_names]
    assert len(set(names)) == len(names)


def test_a_round_trip_through_shards_is_exact(make_model: Callable[..., Any], tmp_path: Path) -> None:
    model, other = make_model(CONFIG), make_model(CONFIG, seed=1)
    directory = write_directory(model, tmp_path / "weights", shard_bytes=20_000)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    for name, file in index["weight_map"].items():
        with safe_open(directory / file, framework="pt") as tensors:
            assert name in tensors.keys()  # noqa: SIM118 - not a dict
    report = load_hf_directory(other, CONFIG, directory)
    assert_same(model, other)
    assert report.skipped == report.redundant == ()
    assert sorted(report.loaded) == sorted(name for name, _ in model.named_parameters())


def test_chosen_parts_are_loaded_and_the_rest_is_reported(make_model: Callable[..., Any], tmp_path: Path) -> None:
    model, other = make_model(CONFIG), make_model(CONFIG, seed=1)
    report = load_hf_directory(other, CONFIG, write_directory(model, tmp_path / "weights"), ["projector"])
    assert_same(model, other, ("projector",))
    assert len(report.loaded) == 5
    assert "lm_head.weight" in report.skipped


@pytest.mark.parametrize("prefix", ["visual.", "model.visual."], ids=["published", "saved by transformers 5"])
def test_the_vision_encoder_comes_from_a_qwen2_5_vl_directory(
    make_model: Callable[..., Any], tmp_path: Path, prefix: str
) -> None:
    vision, language = hf_config(CONFIG, torch.float32)["vision_config"], CONFIG.language
    published = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            vision_config=vision | {"model_type": "qwen2_5_vl"},
            text_config={
                "vocab_size": 64,
                "hidden_size": language.hidden_size,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]},
            },
        )
    )
    published.save_pretrained(tmp_path)
    saved = {
        name.replace("model.visual.", "visual.").replace("visual.", prefix): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    assert any(name.startswith(prefix) for name in saved)
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = make_model(CONFIG)
    report = load_hf_directory(model, CONFIG, tmp_path, ["vision"])
    assert_same(model, make_model(CONFIG), ("projector", "language"))
    assert all(name.startswith("vision.") for name in report.loaded)
    state, layer = published.model.visual.state_dict(), model.vision.blocks.layers[1]
    assert torch.equal(model.vision.patch_embed.weight, state["patch_embed.proj.weight"].flatten(1))
    # Two heads of size 8: the second head's key is rows 24:32 in the directory and the fifth block of the parameter.
    assert torch.equal(layer.self_attention.linear_qkv.weight[32:40], state["blocks.1.attn.qkv.weight"][24:32])
    assert torch.equal(layer.mlp.linear_fc1.bias[24:], state["blocks.1.mlp.up_proj.bias"])


def test_the_language_model_comes_from_a_qwen3_directory(make_model: Callable[..., Any], tmp_path: Path) -> None:
    from transformers import Qwen3Config

    published = Qwen3ForCausalLM(Qwen3Config(**hf_config(CONFIG, torch.float32)["text_config"]))
    published.save_pretrained(tmp_path)
    model = make_model(CONFIG)
    report = load_hf_directory(model, CONFIG, tmp_path, ["language"])
    assert report.skipped == report.redundant == ()
    assert_same(model, make_model(CONFIG), ("vision", "projector"))
    input_ids = torch.arange(7, 21)
    pack = {
        "input_ids": input_ids,
        "position_ids": torch.arange(14).expand(3, -1),
        "cu_seqlens": torch.tensor([0, 14]),
        "pixel_values": torch.zeros(0, 588, dtype=torch.uint8),
        "image_grid_thw": torch.zeros(0, 3, dtype=torch.int64),
    }
    torch.testing.assert_close(model.logits(**pack), published(input_ids[None]).logits[0], rtol=0, atol=1e-4)


def test_names_of_other_families_are_mapped_to_canonical_names() -> None:
    assert canonical_name("model.norm.weight") == "model.language_model.norm.weight"
    assert canonical_name("norm.weight") == "model.language_model.norm.weight"
    assert canonical_name("layers.0.mlp.up_proj.weight") == "model.language_model.layers.0.mlp.up_proj.weight"
    assert canonical_name("lm_head.weight") == "lm_head.weight"
    assert canonical_name("visual.merger.ln_q.weight") == "model.visual.merger.ln_q.weight"
    assert canonical_name("model.visual.merger.ln_q.weight") == "model.visual.merger.ln_q.weight"


def drop_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.visual.blocks.1.norm1.weight"]
    save_file(tensors, directory / "model.safetensors")


def cut_file(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def cut_header(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\x10\x00")


def change_shape(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(63, 24)
    save_file(tensors, directory / "model.safetensors")


def change_attention(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(60, 16)
    save_file(tensors, directory / "model.safetensors")


def change_heads(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.language_model.layers.0.self_attn.q_proj.weight"] = torch.zeros(30, 24)
    save_file(tensors, directory / "model.safetensors")


def point_nowhere(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "gone.safetensors"}}')


def damage_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("{}")


def remove_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def remove_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def damage_config(directory: Path) -> None:
    (directory / "config.json").write_bytes(b"{\xff\xfe")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            drop_tensor,
            "tensors are missing: model.visual.blocks.1.norm1.weight .* vision.blocks.layers.1.input_layernorm",
        ),
        (cut_file, "model.safetensors: .*not a complete safetensors file"),
        (cut_header, "model.safetensors: not a complete safetensors file"),
        (
            change_shape,
            r"model.safetensors: lm_head.weight gives .*output_layer.weight the shape \[63, 24\], .* has \[64, 24\]",
        ),
        (
            change_attention,
            r"model.safetensors: .*blocks.0.attn.qkv.weight \[60, 16\] cannot be converted to .*rows: must be 48, got 60",
        ),
        (
            change_heads,
            r"layers.0.self_attn.q_proj.weight \[30, 24\] and .* cannot be converted to language.decoder.layers.0",
        ),
        (point_nowhere, r"index.json: files \['gone.safetensors'\] are missing"),
        (damage_index, "index.json: weight_map is missing"),
        (remove_weights, "contains neither model.safetensors nor model.safetensors.index.json"),
        (remove_config, "config.json: does not exist"),
        (damage_config, "config.json: not valid JSON"),
    ],
)
def test_a_damaged_directory_is_one_error_that_names_the_place(
    make_model: Callable[..., Any], tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    model = make_model(CONFIG)
    directory = write_directory(model, tmp_path / "weights")
    damage(directory)
    with pytest.raises(WeightError, match=message) as caught:
        load_hf_directory(model, CONFIG, directory)
    assert str(directory) in str(caught.value)


def test_a_directory_of_another_size_is_refused(make_model: Callable[..., Any], tmp_path: Path) -> None:
    directory = write_directory(make_model(CONFIG), tmp_path / "weights")
    wider = replace(CONFIG, language=replace(CONFIG.language, ffn_hidden_size=48))
    with pytest.raises(WeightError, match=r"linear_fc1.weight the shape \[80, 24\], but the model has \[96, 24\]"):
        load_hf_directory(make_model(wider), wider, directory)


def test_reading_a_missing_tensor_names_it(make_model: Callable[..., Any], tmp_path: Path) -> None:
    directory = WeightDirectory(write_directory(make_model(CONFIG), tmp_path / "weights"))
    with pytest.raises(WeightError, match=r"tensor 'model\.gone' is missing"):
        directory.read("model.gone")


def cut_a_shard(directory: Path) -> None:
    file = directory / "model-00002-of-00007.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def remove_a_shard(directory: Path) -> None:
    (directory / "model-00002-of-00007.safetensors").unlink()


def move_in_the_index(directory: Path) -> None:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = "model-00001-of-00007.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def add_to_the_index(directory: Path) -> None:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.gone"] = "model-00001-of-00007.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def repeat_a_tensor(directory: Path) -> None:
    file = directory / "model-00001-of-00007.safetensors"
    save_file(load_file(file) | {"lm_head.weight": torch.zeros(64, 24)}, file)


def make_the_config_a_list(directory: Path) -> None:
    (directory / "config.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_a_shard, "model-00002-of-00007.safetensors: .*not a complete safetensors file"),
        (remove_a_shard, r"index.json: files \['model-00002-of-00007.safetensors'\] are missing"),
        (
            move_in_the_index,
            r"'lm_head.weight' is assigned to model-00001-of-00007.safetensors, which does not contain it",
        ),
        (add_to_the_index, r"'model.gone' is assigned to model-00001-of-00007.safetensors, which does not contain it"),
        (repeat_a_tensor, r"'lm_head.weight' is also in model-00001-of-00007.safetensors"),
        (make_the_config_a_list, "config.json: must be a JSON object"),
    ],
)
def test_a_damaged_directory_of_shards_is_refused_before_anything_is_read(
    make_model: Callable[..., Any], tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    directory = write_directory(make_model(CONFIG), tmp_path / "weights", shard_bytes=20_000)
    assert len(list(directory.glob("*.safetensors"))) == 7
    damage(directory)
    with pytest.raises(WeightError, match=message) as caught:
        WeightDirectory(directory)
    assert str(directory) in str(caught.value)
