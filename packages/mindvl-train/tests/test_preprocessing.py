# SPDX-License-Identifier: Apache-2.0
"""The preprocessing of an encoder reaches the data package, and agrees with its defaults without a model."""

import json
from pathlib import Path

import pytest
import torch

from mindvl_data.preprocessing import WITHOUT_MODEL
from mindvl_model import MindVLConfig, ModelError, named_config
from mindvl_model.hf.config_json import hf_config
from mindvl_model.testing.tiny import smallest_config, smallest_qwen3_vl
from mindvl_train.preprocessing import directory_preprocessing, preprocessing_of


def test_without_a_model_the_preprocessing_is_that_of_the_published_qwen2_5_vl() -> None:
    assert preprocessing_of(named_config("qwen2.5-vl-7b").vision) == WITHOUT_MODEL


def test_qwen3_vl_has_larger_patches_and_timestamps() -> None:
    found = preprocessing_of(smallest_qwen3_vl().vision)
    assert (found.patch_size, found.timestamps, found.frames, found.budget) == (16, True, "endpoints", "whole")
    assert found.video_fields()["max_pixels"] == 25_165_824  # longest_edge of the published video processor
    assert found.video_fields()["min_pixels"] == 4096
    assert (found.coordinates, found.image_mean, found.image_std) == ("relative", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.mark.parametrize("config", [smallest_config(), smallest_qwen3_vl()])
def test_the_preprocessing_of_a_directory_is_that_of_its_encoder(tmp_path: Path, config: MindVLConfig) -> None:
    document = hf_config(config, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert directory_preprocessing(tmp_path) == preprocessing_of(config.vision)
    (tmp_path / "config.json").write_text(
        json.dumps(document | {"vision_config": document["vision_config"] | {"depth": 0}})
    )
    with pytest.raises(ModelError, match=r"config.json: vision_config: depth=0 is not supported"):
        directory_preprocessing(tmp_path)


def test_a_directory_without_an_encoder_has_the_defaults(tmp_path: Path) -> None:
    assert directory_preprocessing(tmp_path) == WITHOUT_MODEL
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 8}))
    assert directory_preprocessing(tmp_path) == WITHOUT_MODEL
