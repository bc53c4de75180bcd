# SPDX-License-Identifier: Apache-2.0
"""The image processor of a directory is the one that transformers loads; settings that training cannot match are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor

from mindvl_model import WeightError
from mindvl_model.hf.config_json import hf_config
from mindvl_model.hf.directory_config import config_from_directory
from mindvl_model.hf.image_processor import pixel_limits
from mindvl_model.testing.tiny import smallest_qwen2_5_vl, smallest_qwen3_vl

IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 784,
    "max_pixels": 3136,
    "image_std": [0.5] * 3,
}


def write(directory: Path, **files: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(hf_config(smallest_qwen2_5_vl(), torch.float32)))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    "files",
    [
        {"preprocessor_config": IMAGES},
        {"processor_config": {"image_processor": IMAGES}},
        {"processor_config": {"image_processor": IMAGES}, "preprocessor_config": {"image_std": [0.25] * 3}},
        {"processor_config": {"image_std": [0.25] * 3}, "preprocessor_config": IMAGES},
    ],
)
def test_the_settings_are_those_that_transformers_loads(tmp_path: Path, files: dict[str, Any]) -> None:
    loaded = AutoImageProcessor.from_pretrained(write(tmp_path, **files))
    vision = config_from_directory(tmp_path).vision
    assert list(vision.image_std) == list(loaded.image_std) == [0.5] * 3
    assert list(vision.image_mean) == pytest.approx(loaded.image_mean)  # absent: the default of the class
    limits = {"shortest_edge": 784, "longest_edge": 3136}
    assert {name: loaded.size[name] for name in limits} == limits
    assert pixel_limits(tmp_path) == {"min_pixels": 784, "max_pixels": 3136}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_normalize": False}, "do_normalize=False is not supported, only True is"),
        ({"do_resize": False}, "do_resize=False is not supported"),
        ({"do_rescale": False}, "do_rescale=False is not supported"),
        ({"rescale_factor": 1.0}, r"rescale_factor=1.0 is not supported; it must be 1 / 255"),
        ({"resample": 2}, "resample=2 is not supported, only 3 is"),
        ({"image_std": [0.5, 0.5, 0.0]}, "image_std=.* is not supported; it must be a list of 3 numbers above 0"),
        ({"merge_size": 4}, "merge_size=4, but config.json has spatial_merge_size=2"),
    ],
)
def test_settings_that_training_does_not_have_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write(tmp_path, preprocessor_config=IMAGES | changes)
    with pytest.raises(WeightError, match=rf"preprocessor_config.json: {message}"):
        config_from_directory(tmp_path)


def test_an_absent_patch_size_is_that_of_the_processor_and_not_of_the_encoder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(smallest_qwen3_vl(), torch.float32)))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    with pytest.raises(WeightError, match=r"patch_size=14, but config.json has patch_size=16"):
        config_from_directory(tmp_path)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        ({"size": {"shortest_edge": 1, "longest_edge": 2}}, {"min_pixels": 1, "max_pixels": 2}),
        ({"size": {"min_pixels": 1, "max_pixels": 2}}, {"min_pixels": 1, "max_pixels": 2}),
        ({"size": {"shortest_edge": 1, "longest_edge": 2}, "max_pixels": 3}, {"min_pixels": 1, "max_pixels": 3}),
        ({"size": 5}, {}),
        ({"size": {"shortest_edge": True, "longest_edge": 2}}, {}),
    ],
)
def test_limits_have_several_names(tmp_path: Path, images: dict[str, Any], expected: dict[str, int]) -> None:
    assert pixel_limits(write(tmp_path, preprocessor_config=images)) == expected
    (tmp_path / "processor_config.json").write_text('{"image_processor": 3}')
    with pytest.raises(WeightError, match="image_processor: must be a JSON object, got 3"):
        pixel_limits(tmp_path)
