# SPDX-License-Identifier: Apache-2.0
"""One model as published and as several versions of transformers save it again is one model to the merge."""

import json

import pytest

from mindvl_merge.differences import config_differences

_DECODER = {"hidden_size": 64, "num_attention_heads": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_VISION = {"depth": 2, "hidden_size": 32, "tokens_per_second": 2}
_AXES = {"mrope_section": [2, 3, 3]}
_PUBLISHED = {
    **_DECODER,
    "model_type": "qwen2_5_vl",
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", **_AXES},
    "sliding_window": 32768,
    "max_window_layers": 28,
    "use_sliding_window": False,
    "vision_config": {**_VISION, "in_chans": 3},
}
_TEXT_4 = {
    **_DECODER,
    "model_type": "qwen2_5_vl_text",
    "rope_theta": 1e6,
    "rope_scaling": {"type": "default", "rope_type": "default", **_AXES},
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": ["full_attention"],
}
_VISION_4 = {**_VISION, "model_type": "qwen2_5_vl", "in_channels": 3, "in_chans": 3}
_SAVED_BY_4_57 = {"model_type": "qwen2_5_vl", "text_config": _TEXT_4, "vision_config": _VISION_4}
_SAVED_BY_4_52 = {**_PUBLISHED, "text_config": {**_TEXT_4, "sliding_window": 32768}, "vision_config": _VISION_4}
_SAVED_BY_5 = {
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": False,
    "text_config": {
        **{key: value for key, value in _DECODER.items() if key != "tie_word_embeddings"},
        "model_type": "qwen2_5_vl_text",
        "rope_parameters": {"rope_type": "default", "type": "mrope", "rope_theta": 1e6, **_AXES},
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    "vision_config": {
        **_VISION,
        "model_type": "qwen2_5_vl_vision",
        "in_channels": 3,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
    },
}
_EXPERTS = {"model_type": "qwen3_moe", "num_experts": 128}
_LATENT = {"model_type": "deepseek_v3", "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
_SAME = {
    "exported": (
        {"vision_config": {"depth": 2}},
        {"vision_config": {"depth": 2, "tokens_per_second": 4}, "hidden_act": "silu"},
    ),
    "published and 4.52": (_PUBLISHED, _SAVED_BY_4_52),
    "published and 4.57": (_PUBLISHED, _SAVED_BY_4_57),
    "published and 5": (_PUBLISHED, _SAVED_BY_5),
    "4.52 and 5": (_SAVED_BY_4_52, _SAVED_BY_5),
    "4.57 and 5": (_SAVED_BY_4_57, _SAVED_BY_5),
    "experts": (_EXPERTS, {"model_type": "qwen3_moe", "num_local_experts": 128}),
    "latent": (_LATENT, _LATENT | {"head_dim": 64, "qk_head_dim": 192, "rope_interleave": True}),
    "head": (
        _DECODER,
        _DECODER | {"head_dim": 16, "attention_bias": False, "temperature": 1.0, "id2label": {"0": "a"}},
    ),
}
_OTHER = {
    "window": (_PUBLISHED, _PUBLISHED | {"use_sliding_window": True}, "sliding_window"),
    "base": (_PUBLISHED, _SAVED_BY_5 | {"text_config": _TEXT_4 | {"rope_theta": 1e4}}, "rope_parameters.rope_theta"),
    "tied": (_PUBLISHED, _SAVED_BY_5 | {"tie_word_embeddings": True}, "tie_word_embeddings"),
    "experts": (_EXPERTS, {"model_type": "qwen3_moe", "num_local_experts": 64}, "num_experts"),
    "interleaved": (_LATENT, _LATENT | {"rope_interleave": False}, "rope_interleave"),
    "head": (_DECODER, _DECODER | {"head_dim": 32}, "head_dim"),
    "nested window": (_DECODER, _DECODER | {"sliding_window": 8}, "sliding_window"),
}


def _refused(tmp_path, first, other):
    for name, document in (("a", first), ("b", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(document))
    found = config_differences(tmp_path / "a", tmp_path / "b")
    assert [one.key for one in found] == [one.key for one in config_differences(tmp_path / "b", tmp_path / "a")]
    return [one.key for one in found if one.is_refused]


@pytest.mark.parametrize("case", _SAME)
def test_a_model_saved_again_by_another_version_does_not_differ(tmp_path, case):
    assert _refused(tmp_path, *_SAME[case]) == []


@pytest.mark.parametrize("case", _OTHER)
def test_another_model_differs_in_every_spelling(tmp_path, case):
    first, other, key = _OTHER[case]
    assert key in _refused(tmp_path, first, other)
