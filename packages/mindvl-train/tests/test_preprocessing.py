# SPDX-License-Identifier: Apache-2.0
"""The preprocessing of an encoder reaches the data package, and agrees with its defaults without a model."""

from mindvl_data.preprocessing import WITHOUT_MODEL
from mindvl_model import named_config
from mindvl_model.testing.tiny import smallest_qwen3_vl
from mindvl_train.preprocessing import preprocessing_of


def test_without_a_model_the_preprocessing_is_that_of_the_published_qwen2_5_vl() -> None:
    assert preprocessing_of(named_config("qwen2.5-vl-7b").vision) == WITHOUT_MODEL


def test_qwen3_vl_has_larger_patches_and_timestamps() -> None:
    found = preprocessing_of(smallest_qwen3_vl().vision)
    assert (found.patch_size, found.timestamps, found.frames, found.budget) == (16, True, "endpoints", "whole")
    assert found.video_fields()["max_pixels"] == 25_165_824  # longest_edge of the published video processor
    assert found.video_fields()["min_pixels"] == 4096
