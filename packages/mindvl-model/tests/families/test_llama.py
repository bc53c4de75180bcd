# SPDX-License-Identifier: Apache-2.0
"""Llama equals LlamaForCausalLM of transformers for every key that changes its function."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from mindvl_model.hf.directory_config import language_config_from_directory
from mindvl_model.testing.tiny import smallest_llama

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 64,
    "max_position_embeddings": 512,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "scaled as Llama 3": {
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "a key head for each query head": {"num_key_value_heads": None},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}},
    "YaRN": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 3.0}},
    "YaRN without rounding": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 3.0,
            "original_max_position_embeddings": 100,
            "truncate": False,
            "attention_factor": 1.3,
        }
    },
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=list(VARIANTS))
def test_logits_and_gradients_are_those_of_transformers(
    assert_published_parity: Callable[..., None], changes: dict[str, Any]
) -> None:
    assert_published_parity(LlamaConfig(**SIZES | changes))


def test_keys_of_directories_made_from_a_gguf_file_have_no_effect(tmp_path: Path) -> None:
    """transformers writes these for SmolLM2-135M-Instruct."""
    sizes = SIZES | {"rms_norm_eps": 9.999999747378752e-06, "tie_word_embeddings": True, "model_type": "llama"}
    keys = {"_model_name_or_path": "Smollm2 135M 8k Lc100K Mix1 Ep2", "unk_token_id": 0, "pretraining_tp": 1}
    read = []
    for document in (sizes, sizes | keys):
        (tmp_path / "config.json").write_text(json.dumps(document))
        read.append(language_config_from_directory(tmp_path))
    assert read[0] == read[1]


def test_the_smallest_model_has_pairs_in_each_range_of_its_scaling() -> None:
    """Turns within 64 positions: 64 / 2 pi / base^(pair / 4) = 10.2, 1.02, 0.1, 0.01; kept from 4 on, divided up to 1."""
    from mindvl_model.language.rotary import rotary_frequencies

    language = smallest_llama().language
    frequencies, factor = rotary_frequencies(language)
    share = (64 * 0.1 / 6.283185307 - 1) / 3
    assert frequencies.tolist() == pytest.approx([1.0, 0.1 * (share + (1 - share) / 8), 0.01 / 8, 0.001 / 8])
    assert factor == 1.0
