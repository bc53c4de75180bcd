# SPDX-License-Identifier: Apache-2.0
"""Named sizes are found by name."""

import pytest

from mindvl_model import ModelError, named_config


def test_named_sizes_are_found_and_unknown_ones_list_what_exists() -> None:
    config = named_config("mindvl-8b")
    assert (config.vision.head_dim, config.language.num_layers, config.tokens.image) == (80, 36, 151655)
    with pytest.raises(ModelError, match=r"model size: 'huge' is unknown. .*mindvl-8b, .*tiny"):
        named_config("huge")


@pytest.mark.parametrize("size", ["3b", "7b", "32b", "72b"])
def test_the_heads_of_qwen2_5_vl_are_as_wide_as_the_residual_stream(size: str) -> None:
    config = named_config(f"qwen2.5-vl-{size}")
    assert config.language.attention.kind == "grouped_query"
    assert config.language.num_heads * config.language.attention.head_dim == config.language.hidden_size
    assert config.position_kind == "mrope_all_axes"
