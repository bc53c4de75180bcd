# SPDX-License-Identifier: Apache-2.0
"""Keys that families share: where older and newer directories have them, and which rotary embeddings are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from mindvl_model import MindVLConfig, WeightError
from mindvl_model.families.keys import check_no_scaling, decoder_sizes, read_grouped_query, rotary_keys
from mindvl_model.families.registry import write_language
from mindvl_model.hf.config_keys import Keys
from mindvl_model.hf.directory_config import language_config_from_directory
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_llama, smallest_qwen3_moe

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


def keys(**values: Any) -> Keys:
    return Keys(values, "config.json")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"rope_theta": 5.0}, (5.0, "default", {})),
        ({"rope_theta": 5.0, "rope_scaling": None}, (5.0, "default", {})),
        ({"rope_parameters": {"rope_theta": 6.0, "rope_type": "default"}}, (6.0, "default", {})),
        ({"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, (5.0, "linear", {"factor": 2.0})),
        ({"rope_scaling": {"type": "default", "rope_type": "mrope"}}, (7.0, "mrope", {})),
    ],
)
def test_the_rotary_embedding_is_found_where_each_version_of_transformers_wrote_it(
    values: dict[str, Any], expected: tuple[float, str, dict[str, Any]]
) -> None:
    assert rotary_keys(keys(**values), 7.0) == expected


def test_a_scaling_without_support_is_named() -> None:
    with pytest.raises(
        WeightError, match=r"config.json: rotary embedding of type 'linear' .*factor.* is not supported"
    ):
        check_no_scaling(keys(), "linear", ["factor"])


@pytest.mark.parametrize(
    ("values", "expected"), [({}, 0.02), ({"initializer_range": None}, 0.02), ({"initializer_range": 0}, 0)]
)
def test_the_deviation_of_initial_weights_has_a_default(values: dict[str, Any], expected: float) -> None:
    assert decoder_sizes(keys(**SIZES | values), keys())["init_std"] == expected


def test_embeddings_are_tied_if_either_section_says_so() -> None:
    assert decoder_sizes(keys(**SIZES), keys(tie_word_embeddings=True))["tie_embeddings"]
    assert not decoder_sizes(keys(**SIZES), keys())["tie_embeddings"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (3, 10)),  # defaults of the family
        ({"num_key_value_heads": None, "head_dim": None}, (4, 8)),  # one for each query head; 32 / 4
        ({"num_key_value_heads": 2, "head_dim": 6}, (2, 6)),
    ],
)
def test_missing_sizes_of_heads_are_the_defaults_of_the_family_and_null_is_derived(
    values: dict[str, Any], expected: tuple[int, int]
) -> None:
    section = keys(**SIZES | {"num_attention_heads": 4} | values)
    if not values:
        section = keys(**SIZES | {"num_attention_heads": 6})
    attention = read_grouped_query("qwen3", section, keys(), head_dim=10, num_kv_heads=3).attention
    assert attention.kind == "grouped_query"
    assert (attention.num_kv_heads, attention.head_dim) == expected


WINDOWS: list[tuple[dict[str, Any], bool]] = [
    ({"sliding_window": None}, True),
    ({"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 0}, True),
    ({"sliding_window": 512, "use_sliding_window": None}, True),
    ({"sliding_window": 511, "use_sliding_window": True, "max_window_layers": 0}, False),
    ({"sliding_window": 600.0, "use_sliding_window": True, "max_window_layers": 0}, False),
]


@pytest.mark.parametrize(("windows", "accepted"), WINDOWS)
@pytest.mark.parametrize(
    "config", [smallest_llama(), smallest_config(), smallest_qwen3_moe(), smallest_deepseek_v3(num_mtp_layers=0)]
)
def test_each_family_accepts_only_windows_without_effect(
    tmp_path: Path, config: MindVLConfig, windows: dict[str, Any], accepted: bool
) -> None:
    document = write_language(config.language)
    (tmp_path / "config.json").write_text(json.dumps(document | windows))
    if accepted:
        assert language_config_from_directory(tmp_path).num_heads == config.language.num_heads
        return
    with pytest.raises(WeightError, match=r"(sliding_window=.* is narrower than max|use_sliding_window=True is not)"):
        language_config_from_directory(tmp_path)


def test_a_window_alone_is_refused_where_the_family_has_no_key_for_it(tmp_path: Path) -> None:
    """transformers ignores it in Llama, but other tools do not."""
    (tmp_path / "config.json").write_text(
        json.dumps(write_language(smallest_llama().language) | {"sliding_window": 64})
    )
    with pytest.raises(WeightError, match="sliding_window=64 is not supported, because it is narrower than max_pos"):
        language_config_from_directory(tmp_path)
