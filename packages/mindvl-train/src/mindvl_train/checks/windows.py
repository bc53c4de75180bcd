# SPDX-License-Identifier: Apache-2.0
"""Whether the images of a check are larger than a window of the vision encoder.

Comes after the loader. Where every image fits into one window, windowed attention is full attention, and a check that
passes says nothing about windows: it notes that.
"""

from collections.abc import Iterable
from itertools import islice

from mindvl_data import Batch, Loader
from mindvl_model import VisionConfig
from mindvl_train.config import RunConfig


def exercises_windows(packs: Iterable[Batch], vision: VisionConfig) -> bool:
    """Whether an image or a frame of a video is cut into windows; True for an encoder that has none."""
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
    """One sentence where no image exceeds a window, or nothing."""
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
