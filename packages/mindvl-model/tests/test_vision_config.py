# SPDX-License-Identifier: Apache-2.0
"""A vision encoder takes the defaults of its kind, and refuses fields that the kind lacks."""

from typing import Any

import pytest

from mindvl_model import ModelError, VisionConfig

SIZES: dict[str, Any] = {"hidden_size": 16, "num_layers": 4, "num_heads": 2, "ffn_hidden_size": 24}


def test_fields_without_a_value_have_the_default_of_the_kind() -> None:
    windowed = VisionConfig(**SIZES, full_attention_layers=(3,))
    assert (windowed.kind, windowed.patch_size, windowed.window_size) == ("qwen2_5_vl", 14, 112)
    assert (windowed.num_position_embeddings, windowed.deepstack_layers) == (0, ())
    learned = VisionConfig(**SIZES, kind="qwen3_vl")
    assert (learned.patch_size, learned.window_size, learned.num_position_embeddings) == (16, 0, 2304)
    assert learned.full_attention_layers == (0, 1, 2, 3)
    assert learned.image_mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"full_attention_layers: is required for Qwen2\.5-VL"),
        ({"full_attention_layers": (1,), "deepstack_layers": (1,)}, r"deepstack_layers: Qwen2\.5-VL does not have it"),
        ({"kind": "qwen3_vl", "window_size": 128}, r"window_size: Qwen3-VL does not have it"),
        ({"kind": "qwen3_vl", "full_attention_layers": (1,)}, "full_attention_layers: must be all 4 layers"),
        ({"kind": "qwen3_vl", "deepstack_layers": (2, 4)}, r"deepstack_layers: layers \[4\] do not exist"),
        ({"kind": "qwen3_vl", "deepstack_layers": (2, 2)}, "deepstack_layers: must be different layers"),
        ({"kind": "qwen3_vl", "num_position_embeddings": 0}, "num_position_embeddings: must be at least 1"),
        ({"kind": "clip"}, "kind: 'clip' is unknown. Use one of qwen2_5_vl, qwen3_vl"),
    ],
)
def test_a_field_that_does_not_fit_the_kind_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        VisionConfig(**SIZES | changes)
