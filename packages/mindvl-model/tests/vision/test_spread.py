# SPDX-License-Identifier: Apache-2.0
"""Frames dealt out to peers, and when that is worth it; equal results are proved in testing/test_layouts.py."""

import random
from dataclasses import replace

import pytest
import torch

from mindvl_model import named_config
from mindvl_model.parallel_config import ParallelConfig
from mindvl_model.testing.tiny import smallest_config
from mindvl_model.vision.spread import deal_frames, plan_peer, spreading_wins, take_ranges

IMAGES = [(1, 4, 6), (1, 10, 4), (1, 2, 2), (1, 8, 8)]
VIDEOS = [(3, 4, 6), (2, 2, 4)]


def test_the_largest_frames_are_dealt_first_to_whom_has_least() -> None:
    assert deal_frames([10, 70, 30, 50], 2) == [[0, 1], [2, 3]]
    assert deal_frames([5, 5, 5], 2) == [[0, 2], [1]]
    assert deal_frames([8], 3) == [[0], [], []]


def test_no_peer_has_more_than_the_mean_and_one_frame() -> None:
    choose = random.Random(0)
    for _ in range(50):
        patches = [4 * choose.randint(1, 200) for _ in range(choose.randint(1, 30))]
        peers = choose.randint(1, 8)
        parts = deal_frames(patches, peers)
        assert sorted(frame for part in parts for frame in part) == list(range(len(patches)))
        loads = [sum(patches[frame] for frame in part) for part in parts]
        assert max(loads) <= sum(patches) / peers + max(patches)


@pytest.mark.parametrize("num_peers", [1, 2, 3, 8, 16])
def test_gathered_parts_come_back_in_the_order_of_the_pack(num_peers: int) -> None:
    """Every block of four patches has its own number; a peer's visual tokens are the numbers of its blocks."""
    num_image_patches, num_video_patches = (sum(t * h * w for t, h, w in grids) for grids in (IMAGES, VIDEOS))
    blocks = torch.arange((num_image_patches + num_video_patches) // 4)
    patches = blocks.repeat_interleave(4)
    images, videos = patches[:num_image_patches], patches[num_image_patches:]
    gathered = []
    for peer in range(num_peers):
        part = plan_peer(IMAGES, VIDEOS, 2, peer, num_peers)
        own = torch.cat([take_ranges(images, part.image_ranges), take_ranges(videos, part.video_ranges)])
        assert len(own) == sum(time * height * width for time, height, width in part.grids) == 4 * part.num_tokens
        assert part.num_tokens <= part.slot
        gathered.append(torch.nn.functional.pad(own[::4], (0, part.slot - part.num_tokens), value=-1))
    assert torch.equal(torch.cat(gathered)[part.order], blocks)


def test_spreading_wins_where_work_would_be_repeated_or_sent_often() -> None:
    config = named_config("mindvl-8b")
    assert not spreading_wins(config, ParallelConfig())
    assert spreading_wins(config, ParallelConfig(cp_size=4))
    assert spreading_wins(config, ParallelConfig(tp_size=8))
    assert not spreading_wins(
        config, ParallelConfig(tp_size=8), frames_per_pack=0.25
    )  # peers would wait for a rare image
    odd = smallest_config()
    odd = replace(odd, vision=replace(odd.vision, num_heads=1))
    assert spreading_wins(odd, ParallelConfig(tp_size=2))  # one head cannot be split
