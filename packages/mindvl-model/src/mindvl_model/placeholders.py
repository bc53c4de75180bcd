# SPDX-License-Identifier: Apache-2.0
"""Do the placeholders of a pack match its images and videos? Answered on the host, before anything is copied.

Comes after the batch, before its copy to the device: on the host the answer costs a comparison, on a device the host
would have to wait for it. A pack that does not match would overwrite embeddings of text, or leave placeholders.
"""

from typing import Any

from torch import Tensor

from mindvl_model.config import MindVLConfig
from mindvl_model.errors import ModelError


def check_placeholders(
    config: MindVLConfig,
    *,
    input_ids: Tensor,
    image_grid_thw: Tensor,
    video_grid_thw: Tensor | None = None,
    **others: Any,
) -> None:
    """Compare the placeholders in a pack with the visual tokens that its grids give.

    Args:
        config: Its token ids and merge size.
        input_ids: [T], on the host.
        image_grid_thw: [num_images, 3] patches, on the host.
        video_grid_thw: [num_videos, 3].
        others: Further inputs of the model, not looked at.

    Raises:
        ModelError: The numbers differ, or there is a video and the model has no token for it.
    """
    tokens, merged = config.tokens, config.vision.spatial_merge_size**2
    for kind, placeholder, grids in (
        ("image", tokens.image, image_grid_thw),
        ("video", tokens.video, video_grid_thw),
    ):
        num_tokens = 0 if grids is None else int(grids.prod(dim=-1).sum()) // merged
        if placeholder is None:
            if num_tokens:
                raise ModelError(
                    f"batch: a {kind}, but the model has no tokens.{kind}. Set model.tokens.{kind}, or leave out "
                    f"samples with {kind}s."
                )
            continue
        count = int((input_ids == placeholder).sum())
        if count != num_tokens:
            raise ModelError(
                f"batch: {count} {kind} placeholders, but the {kind}s give {num_tokens} visual tokens. The pack was "
                f"made with other {kind} settings than the model's, or {kind}s are missing: use the processor of this "
                "model."
            )
