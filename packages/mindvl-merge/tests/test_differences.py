# SPDX-License-Identifier: Apache-2.0
"""Configurations are compared key by key, whatever spelling a version of transformers gave them."""

import json

import pytest

from mindvl_merge.differences import config_differences


def _keys(tmp_path, first, other):
    for name, document in (("a", first), ("b", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(document))
    return {one.key: one.is_refused for one in config_differences(tmp_path / "a", tmp_path / "b")}


@pytest.mark.parametrize(
    ("first", "other", "expected"),
    [
        ({"a": None, "b": 1}, {"b": 1.0}, {}),
        (
            {"text_config": {"dtype": "x", "eps": 1}},
            {"text_config": {"eps": 2}},
            {"text_config.dtype": 0, "text_config.eps": 1},
        ),
        (
            {"rope_theta": 5, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5, "mrope_section": [1, 2]}},
            {},
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, {"rope_scaling": {"rope_type": "yarn", "factor": 2}}, {}),
        ({"rope_scaling": {"type": "yarn"}}, {"rope_scaling": None}, {"rope_parameters.rope_type": 1}),
        ({"rope_parameters": {"rope_theta": 5}}, {}, {"rope_parameters.rope_theta": 1}),
        ({"rope_scaling": [1]}, {}, {"rope_scaling": 1}),
        ({"layer_types": ["full_attention"]}, {"layer_types": ["linear_attention"]}, {"layer_types": 1}),
        ({"section": {}}, {"section": {"key": 1}}, {"section": 1, "section.key": 1}),
    ],
)
def test_only_what_differs_in_meaning_differs(tmp_path, first, other, expected):
    assert _keys(tmp_path, first, other) == expected
