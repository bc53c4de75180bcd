# SPDX-License-Identifier: Apache-2.0
"""Frames are assigned to ranks; the results are compared with one process in testing/test_layouts.py."""

import random
from dataclasses import replace

import pytest
import torch

from mindvl_model import named_config
from mindvl_model.parallel_config import ParallelConfig
from mindvl_model.testing.tiny import smallest_config
from mindvl_model.vision.spread import assign_frames, spreading_wins, take_ranges, vision_shard

IMAGES = [(1, 4, 6), (1, 10, 4), (1, 2, 2), (1, 8, 8)]
VIDEOS = [(3, 4, 6), (2, 2, 4)]


def test_each_frame_is_assigned_to_the_rank_with_the_smallest_load_largest_first() -> None:
    assert assign_frames([10, 70, 30, 50], 2) == [[0, 1], [2, 3]]
    assert assign_frames([5, 5, 5], 2) == [[0, 2], [1]]
    assert assign_frames([8], 3) == [[0], [], []]


def test_no_rank_has_more_than_the_mean_plus_one_frame() -> None:
    choose = random.Random(0)
    for _ in range(50):
        patches = [4 * choose.randint(1, 200) for _ in range(choose.randint(1, 30))]
        num_ranks = choose.randint(1, 8)
        parts = assign_frames(patches, num_ranks)
        assert sorted(frame for part in parts for frame in part) == list(range(len(patches)))
        loads = [sum(patches[frame] for frame in part) for part in parts]
        assert max(loads) <= sum(patches) / num_ranks + max(patches)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 16])
def test_gathered_shards_are_put_in_the_order_of_the_pack(num_ranks: int) -> None:
    """Every merge block of four patches has its own number; the visual tokens of a rank are those of its blocks."""
    num_image_patches, num_video_patches = (sum(t * h * w for t, h, w in grids) for grids in (IMAGES, VIDEOS))
    blocks = torch.arange((num_image_patches + num_video_patches) // 4)
    patches = blocks.repeat_interleave(4)
    images, videos = patches[:num_image_patches], patches[num_image_patches:]
    gathered = []
    for rank in range(num_ranks):
        shard = vision_shard(IMAGES, VIDEOS, 2, rank, num_ranks)
        own = torch.cat([take_ranges(images, shard.image_ranges), take_ranges(videos, shard.video_ranges)])
        assert len(own) == sum(time * height * width for time, height, width in shard.grids) == 4 * shard.num_tokens
        assert shard.num_tokens <= shard.max_tokens
        gathered.append(torch.nn.functional.pad(own[::4], (0, shard.max_tokens - shard.num_tokens), value=-1))
    assert torch.equal(torch.cat(gathered)[shard.order], blocks)


def test_spreading_is_faster_if_work_would_be_repeated_or_communicated_often() -> None:
    config = named_config("mindvl-8b")
    assert not spreading_wins(config, ParallelConfig())
    assert spreading_wins(config, ParallelConfig(cp_size=4))
    assert spreading_wins(config, ParallelConfig(tp_size=8))
    assert not spreading_wins(config, ParallelConfig(tp_size=8), frames_per_pack=0.25)  # most ranks would have no image
    odd = smallest_config()
    odd = replace(odd, vision=replace(odd.vision, num_heads=1))
    assert spreading_wins(odd, ParallelConfig(tp_size=2))  # one head cannot be split
