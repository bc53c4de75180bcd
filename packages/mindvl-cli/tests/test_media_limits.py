# SPDX-License-Identifier: Apache-2.0
"""Settings of `mindvl data` by hand: the options, then the model of the directory, then Qwen2.5-VL."""

import json
from pathlib import Path

import pytest
import torch

from mindvl_cli.media_limits import media_configs
from mindvl_data import DataError, ImageConfig, VideoConfig
from mindvl_model.hf.config_json import hf_config
from mindvl_model.testing.tiny import smallest_qwen3_vl


def test_without_a_model_the_settings_are_those_without_a_recipe(tmp_path: Path) -> None:
    defaults = (ImageConfig(), VideoConfig())
    assert media_configs(None, min_pixels=None, max_pixels=None) == defaults
    assert media_configs(tmp_path, min_pixels=None, max_pixels=None) == defaults


def test_options_replace_the_values_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(smallest_qwen3_vl(), torch.float32)))
    image, video = media_configs(tmp_path, min_pixels=None, max_pixels=9 * 1024, fps=1.0)
    assert (image.multiple, image.min_pixels, image.max_pixels, image.coordinates) == (32, 4096, 9216, "relative")
    assert (video.fps, video.timestamps, video.budget) == (1.0, True, "whole")


def test_limits_below_a_visual_token_of_the_model_are_refused(tmp_path: Path) -> None:
    assert media_configs(None, min_pixels=784, max_pixels=None)[0].min_pixels == 784
    (tmp_path / "config.json").write_text(json.dumps(hf_config(smallest_qwen3_vl(), torch.float32)))
    with pytest.raises(DataError, match="784 and 1310720 allow no image size"):
        media_configs(tmp_path, min_pixels=784, max_pixels=None)
