# SPDX-License-Identifier: Apache-2.0
"""Check that the placeholder tokens of a packed sequence match its images and videos.

Runs on the host, after the batch is built and before it is copied to the device, where the check would make the host
wait. In a pack that does not match, visual tokens would overwrite text embeddings or placeholders would remain.
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
    """Compare the number of placeholder tokens in a pack with the number of visual tokens of its grids.

    Args:
        config: Configuration with the token ids and the merge size.
        input_ids: [T], on the host.
        image_grid_thw: [num_images, 3] in patches, on the host.
        video_grid_thw: [num_videos, 3] in patches, on the host.
        others: Further inputs of the model, ignored.

    Raises:
        ModelError: The numbers differ, or there is a video and the model has no video token.
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
                    f"batch: contains a {kind}, but tokens.{kind} of the model is not set. Use a tokenizer with "
                    f"<|{kind}_pad|>, or leave out samples with {kind}s."
                )
            continue
        count = int((input_ids == placeholder).sum())
        if count != num_tokens:
            raise ModelError(
                f"batch: {count} {kind} placeholders for {num_tokens} visual tokens: the pack was built with different "
                f"{kind} settings, or {kind}s are missing. Use the image and video settings of this model."
            )
