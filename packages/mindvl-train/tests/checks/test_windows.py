# SPDX-License-Identifier: Apache-2.0
"""Images that fit one window exercise no windowed attention, and a check says so."""

from collections.abc import Callable
from dataclasses import replace

from mindvl_model.testing.tiny import smallest_config
from mindvl_train import ModelSection, RunConfig
from mindvl_train.checks.windows import note_without_windows


def test_images_that_fit_one_window_are_noted(make_config: Callable[..., RunConfig]) -> None:
    model = smallest_config(vocab_size=264)
    wide = ModelSection(vision=replace(model.vision, window_size=112), language=model.language)
    config = make_config(model=wide)
    note = note_without_windows(config, num_packs=2)
    assert note.startswith("no image is larger than a window of the vision encoder (112 x 112 pixels)")
    assert note_without_windows(make_config(), num_packs=8) == ""


def test_an_encoder_without_windows_needs_no_larger_image(make_config: Callable[..., RunConfig]) -> None:
    model = smallest_config(vocab_size=264)
    full = replace(model.vision, window_size=112, full_attention_layers=(0, 1))
    config = make_config(model=ModelSection(vision=full, language=model.language))
    assert note_without_windows(config, num_packs=2) == ""
