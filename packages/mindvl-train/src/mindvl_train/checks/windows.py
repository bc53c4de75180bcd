# SPDX-License-Identifier: Apache-2.0
"""Whether the images of a check exceed the attention window of the vision encoder.

Comes after the loader. If every image fits into one window, windowed attention equals full attention, and a check does
not cover it; the check reports that in a note.
"""

from collections.abc import Iterable
from itertools import islice

from mindvl_data import Batch, Loader
from mindvl_model import VisionConfig
from mindvl_train.config import RunConfig


def exercises_windows(packs: Iterable[Batch], vision: VisionConfig) -> bool:
    """Whether an image or video frame has several windows; true for an encoder without windowed attention."""
    if len(vision.full_attention_layers) >= vision.num_layers:
        return True
    patches = vision.window_size // vision.patch_size
    return any(
        int(side) > patches
        for pack in packs
        for grids in (pack.image_grid_thw, pack.video_grid_thw)
        for side in grids[:, 1:].flatten()
    )


def window_note(packs: Iterable[Batch], vision: VisionConfig) -> str:
    """A note if no image exceeds a window, or empty text."""
    if exercises_windows(packs, vision):
        return ""
    return (
        f"no image is larger than a window of the vision encoder ({vision.window_size} x {vision.window_size} pixels), "
        "so window attention was not checked. Use data with larger images, or raise data.image.max_pixels."
    )


def note_without_windows(config: RunConfig, *, num_packs: int) -> str:
    """The note for the first packs of a run; loads them without pixels."""
    from mindvl_train.resolved_run import tokenized_model

    model_config = tokenized_model(config)
    with Loader(
        config.data,
        global_batch_size=config.global_batch_size,
        position_kind=model_config.position_kind,
        with_pixels=False,
    ) as loader:
        return window_note(list(islice(loader, num_packs)), model_config.vision)
