# SPDX-License-Identifier: Apache-2.0
"""Invalid sizes raise errors that name the field."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from mindvl_model import ModelError, config_from_json, for_tokenizer, named_config
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3

SMALLEST = smallest_config()
SPECIAL_IDS = {
    "<|endoftext|>": 10,
    "<|im_end|>": 12,
    "<|vision_start|>": 13,
    "<|vision_end|>": 14,
    "<|image_pad|>": 15,
}


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("vision", {"num_heads": 3}, "hidden_size: must be num_heads times .*, got 16 with num_heads=3"),
        ("vision", {"num_heads": 8}, r"a multiple of 4 \(for two rotary axes\)"),
        (
            "vision",
            {"full_attention_layers": (0, 2)},
            r"full_attention_layers: layers \[2\] do not exist .* num_layers=2",
        ),
        ("vision", {"temporal_patch_size": 1}, "temporal_patch_size: must be 2 .*, got 1. Use 2"),
        ("vision", {"temporal_patch_size": 4}, "temporal_patch_size: must be 2 .*, got 4"),
        ("vision", {"window_size": 100}, "window_size: must be a multiple of .* = 28 pixels, got 100"),
    ],
)
def test_impossible_sizes_are_refused(part: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(getattr(SMALLEST, part), **changes)


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ModelError, match=r"tokens\.image: must be an id below vocab_size=64, got 64"):
        replace(SMALLEST, tokens=replace(SMALLEST.tokens, image=64))


def test_the_tokenizer_gives_ids_and_enlarges_the_vocabulary() -> None:
    config = for_tokenizer(SMALLEST, SPECIAL_IDS, vocab_size=100)
    assert config.language.vocab_size == 128  # the next multiple, which tensor-parallel ranks can share
    assert vars(config.tokens) == {
        "image": 15,
        "vision_start": 13,
        "vision_end": 14,
        "end_of_turn": 12,
        "pad": 10,
        "video": None,
    }
    assert for_tokenizer(SMALLEST, SPECIAL_IDS, vocab_size=20).language.vocab_size == 64  # a larger vocabulary is kept


def test_a_tokenizer_without_a_needed_token_is_refused() -> None:
    without = {text: number for text, number in SPECIAL_IDS.items() if text != "<|image_pad|>"}
    with pytest.raises(ModelError, match=r"special tokens <\|image_pad\|> are missing"):
        for_tokenizer(SMALLEST, without, vocab_size=100)


@pytest.mark.parametrize("name", ["tiny", "mindvl-671b-a37b", "qwen2.5-vl-7b"])
def test_a_configuration_comes_back_from_json(name: str) -> None:
    config = named_config(name)
    document = json.loads(json.dumps(asdict(config)))
    assert config_from_json(document) == config
    document["language"]["kind"] = "qwen9"
    with pytest.raises(ModelError, match="'qwen9'"):
        config_from_json(document)


def test_a_manifest_of_an_earlier_version_gives_the_same_decoder() -> None:
    """Earlier versions stored the fields of a family, without those that newer versions add."""
    config = smallest_deepseek_v3()
    fields = {
        "kind": "deepseek_v3",
        "hidden_size": 24,
        "num_layers": 3,
        "num_heads": 4,
        "ffn_hidden_size": 40,
        "vocab_size": 64,
        "tie_embeddings": False,
        "rotary_base": 10000.0,
        "norm_epsilon": 1e-6,
        "max_positions": 512,
        "init_std": 0.1,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "nope_head_dim": 8,
        "rope_head_dim": 8,
        "value_head_dim": 6,
        "num_dense_layers": 1,
        "num_experts": 8,
        "experts_per_token": 2,
        "expert_ffn_hidden_size": 12,
        "num_shared_experts": 1,
        "num_expert_groups": 4,
        "groups_per_token": 2,
        "routed_scale": 2.5,
        "bias_update_rate": 0.001,
        "num_mtp_layers": 1,
        "mtp_loss_weight": 0.3,
        "yarn": {
            "factor": 4.0,
            "original_max_positions": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    }
    document = json.loads(json.dumps(asdict(config)))
    assert config_from_json(document | {"language": fields}) == config


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("language", "num_layers", None),
        ("language", "hidden_size", True),
        ("language", "norm_epsilon", float("nan")),
        ("language", "rope", {"rotary_base": float("nan")}),
        ("language", "rope", {"base": 1.0}),
        ("language", "attention", {"kind": "latent"}),
        ("language", "kind", []),
        ("vision", "image_std", []),
        ("vision", "image_mean", [0.5, {}, 0.5]),
        ("vision", "full_attention_layers", 3),
        ("tokens", "video", "x"),
    ],
)
def test_a_json_configuration_with_values_of_other_types_is_refused(part: str, name: str, value: object) -> None:
    document = json.loads(json.dumps(asdict(named_config("tiny"))))
    document[part][name] = value
    with pytest.raises(ModelError):
        config_from_json(document)
