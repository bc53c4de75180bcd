# SPDX-License-Identifier: Apache-2.0
"""Named sizes: found by name, and what follows from their numbers is what was published."""

import pytest

from mindvl_model import ModelError, named_config


def test_named_sizes_are_found_and_unknown_ones_list_what_exists() -> None:
    config = named_config("mindvl-8b")
    assert (config.vision.head_dim, config.language.num_layers, config.tokens.image) == (80, 36, 151655)
    with pytest.raises(ModelError, match=r"no size is called 'huge'.*'mindvl-8b', .*'tiny'"):
        named_config("huge")


@pytest.mark.parametrize(
    ("name", "hidden_size", "head_widths"),
    [
        ("qwen2.5-vl-3b", 2048, 2048),
        ("qwen2.5-vl-7b", 3584, 3584),
        ("qwen2.5-vl-32b", 5120, 5120),
        ("qwen2.5-vl-72b", 8192, 8192),
    ],
)
def test_the_heads_of_qwen2_5_vl_are_as_wide_as_the_residual_stream(
    name: str, hidden_size: int, head_widths: int
) -> None:
    language = named_config(name).language
    assert language.kind == "qwen2"
    assert language.hidden_size == hidden_size
    assert language.num_heads * language.head_dim == head_widths
    assert named_config(name).position_kind == "mrope"
