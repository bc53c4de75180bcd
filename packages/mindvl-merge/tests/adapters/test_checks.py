# SPDX-License-Identifier: Apache-2.0
"""Adapters that do not belong together, and settings of whole models, are refused."""

import json

import pytest
import torch

from mindvl_merge import MergeConfig, MergeConfigError, MergeError, greedy_soup, merge
from mindvl_merge.adapters.checks import is_selected
from mindvl_merge.estimate import estimate

SETTINGS = dict(r=2, lora_alpha=2, target_modules=["q_proj"])


def _edit(path, **values):
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_an_adapter_and_a_model_are_refused(tmp_path, make_adapter, make_directory):
    models = (make_directory("model", {"w": torch.ones(2)}), make_adapter("a", **SETTINGS))
    with pytest.raises(MergeError, match=r"a: is an adapter, but .*model is not\. .*--merge-adapter"):
        merge(MergeConfig(models=models, out=tmp_path / "out"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(method="slerp"), "is an adapter, and method slerp needs whole models"),
        (dict(only=("language",)), "only: is for whole models"),
        (dict(match_tokens=True), "match_tokens: is for whole models"),
        (dict(part_weights={"vision": (1.0, 0.0)}), "no adapted layer is selected by 'vision'"),
    ],
)
def test_settings_of_whole_models_are_refused(tmp_path, make_adapter, settings, message):
    models = (make_adapter("a", **SETTINGS), make_adapter("b", **SETTINGS))
    with pytest.raises(MergeError, match=message):
        merge(MergeConfig(models=models, out=tmp_path / "out", **settings))
    assert not (tmp_path / "out").exists()


def test_a_greedy_soup_of_adapters_is_refused(tmp_path, make_adapter):
    with pytest.raises(MergeConfigError, match="a greedy soup scores whole models"):
        greedy_soup(MergeConfig(models=(make_adapter("a", **SETTINGS),), out=tmp_path / "out"), lambda model: 0.0)


def test_other_base_models_are_refused_unless_allowed(tmp_path, make_adapter):
    a, b = (make_adapter(name, **SETTINGS) for name in "ab")
    _edit(b, base_model_name_or_path="other")
    config = dict(models=(a, b), out=tmp_path / "out")
    with pytest.raises(MergeError, match=r"b.adapter_config\.json: base_model_name_or_path is other, but base in "):
        merge(MergeConfig(**config))
    merge(MergeConfig(**config, allow_different=("base_model_name_or_path",)))
    _edit(b, base_model_name_or_path=None)  # unknown
    merge(MergeConfig(**config, overwrite=True))
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"


def test_one_directory_by_two_paths_is_one_base(tmp_path, make_adapter):
    a, b = (make_adapter(name, **SETTINGS) for name in "ab")
    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to("base")
    _edit(a, base_model_name_or_path=str(tmp_path / "base"))
    _edit(b, base_model_name_or_path=str(tmp_path / "link"))
    merge(MergeConfig(models=(a, b), out=tmp_path / "out"))


def test_layers_of_other_sizes_are_refused(tmp_path, make_adapter):
    a, b = make_adapter("a", **SETTINGS), make_adapter("b", **{**SETTINGS, "target_modules": ["v_proj"]})
    file = b / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"v_proj", b"q_proj"))
    with pytest.raises(MergeError, match=r"experts, outputs and inputs \[1, 2, 6\], but for \[1, 6, 6\] in "):
        merge(MergeConfig(models=(a, b), out=tmp_path / "out"))


def test_a_dry_run_counts_bytes_and_writes_nothing(tmp_path, make_adapter):
    a, b = (make_adapter(name, **SETTINGS) for name in "ab")
    found = estimate(MergeConfig(models=(a, b), out=tmp_path / "out"))
    num_bytes = 2 * (2 * 6 + 6 * 2) * 4  # two layers of 6 x 6, rank 2, float32
    assert (found.read_bytes, found.written_bytes, found.seconds) == (2 * num_bytes, 2 * num_bytes, None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("pattern", "expected"), [("language", True), ("model.layers.0", True), ("vision", False), ("*v_proj", True)]
)
def test_patterns_select_layers_as_they_select_weights(pattern, expected):
    assert is_selected("model.language_model.layers.0.v_proj", pattern) is expected
