# SPDX-License-Identifier: Apache-2.0
"""Mistral equals MistralForCausalLM of transformers; windows that hide positions are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig

from mindvl_model import WeightError
from mindvl_model.families.mistral import MistralPreset
from mindvl_model.hf.directory_config import language_config_from_directory

# config.json of Mistral-7B-Instruct-v0.3 as it was published.
PUBLISHED: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 32768,
}


def read(directory: Path, document: dict[str, Any]) -> Any:
    (directory / "config.json").write_text(json.dumps(document))
    return language_config_from_directory(directory)


@pytest.mark.parametrize(
    "changes",
    [{"sliding_window": None}, {"sliding_window": 512, "head_dim": 10, "tie_word_embeddings": True}],
    ids=["no window", "odd heads, a window of all positions"],
)
def test_logits_and_gradients_are_those_of_transformers(
    assert_published_parity: Callable[..., None], changes: dict[str, Any]
) -> None:
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "vocab_size": 64,
        "max_position_embeddings": 512,
    }
    assert_published_parity(MistralConfig(**sizes | changes))


def test_the_published_model_is_the_preset_with_its_sizes(tmp_path: Path) -> None:
    preset = MistralPreset(
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=14336,
        vocab_size=32768,
    )
    assert read(tmp_path, PUBLISHED) == preset.decoder()


def test_windows_that_hide_positions_are_not_supported(tmp_path: Path) -> None:
    """A missing key means 4096, as in transformers."""
    without = {name: value for name, value in PUBLISHED.items() if name != "sliding_window"}
    for document in (PUBLISHED | {"sliding_window": 4096}, without):
        with pytest.raises(
            WeightError, match=r"config.json: sliding_window=4096 is not supported, because it is narrower"
        ):
            read(tmp_path, document)
