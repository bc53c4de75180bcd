# SPDX-License-Identifier: Apache-2.0
"""The number of placeholders must match the grids."""

from dataclasses import replace

import pytest
import torch

from mindvl_model import ModelError
from mindvl_model.placeholders import check_placeholders
from mindvl_model.testing.tiny import smallest_config

CONFIG = smallest_config()
GRID = torch.tensor([[1, 4, 6]])  # 24 patches, 6 visual tokens
NO_GRID = torch.zeros(0, 3, dtype=torch.int64)


def _ids(num_placeholders: int) -> torch.Tensor:
    return torch.tensor([1] * 3 + [CONFIG.tokens.image] * num_placeholders + [1])


def test_as_many_placeholders_as_visual_tokens_pass() -> None:
    check_placeholders(CONFIG, input_ids=_ids(6), image_grid_thw=GRID, labels=None)
    check_placeholders(CONFIG, input_ids=_ids(12), image_grid_thw=GRID.repeat(2, 1), video_grid_thw=NO_GRID)
    check_placeholders(CONFIG, input_ids=_ids(0), image_grid_thw=NO_GRID)
    film = torch.tensor([CONFIG.tokens.video] * 12)
    check_placeholders(CONFIG, input_ids=film, image_grid_thw=NO_GRID, video_grid_thw=torch.tensor([[2, 4, 6]]))


@pytest.mark.parametrize("count", [0, 5, 7])
def test_another_number_of_placeholders_is_refused(count: int) -> None:
    with pytest.raises(ModelError, match=f"{count} image placeholders for 6 visual tokens"):
        check_placeholders(CONFIG, input_ids=_ids(count), image_grid_thw=GRID)


def test_a_video_without_a_token_for_it_is_refused() -> None:
    config = replace(CONFIG, tokens=replace(CONFIG.tokens, video=None))
    with pytest.raises(ModelError, match=r"tokens\.video of the model is not set"):
        check_placeholders(config, input_ids=_ids(0), image_grid_thw=NO_GRID, video_grid_thw=GRID)
