# SPDX-License-Identifier: Apache-2.0
"""Assign the frames of a pack to tensor- and context-parallel ranks, and estimate whether this beats tensor parallelism.

Computed on the host from the grids of the batch alone, so that all ranks of the group, which have the same pack, agree
without communication. An image is one frame. Attention of the vision encoder does not cross frames, so the frames of a
video can be assigned to different ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mindvl_model.config import MindVLConfig
from mindvl_model.flops import pack_flops
from mindvl_model.parallel_config import ParallelConfig
from mindvl_model.vision.positions import Grid

FLOPS_PER_BYTE = 2000.0  # ratio of compute to interconnect bandwidth: 400 TFLOP/s at 200 GB/s
FRAMES_PER_PACK = 8.0  # images of about 1,000 visual tokens in a pack of 8,192 tokens
TOKENS_ALONG_SIDE = 32  # visual tokens along each side of such an image


@dataclass(frozen=True)
class VisionShard:
    """The frames of a pack that one rank encodes, and the order of the gathered visual tokens."""

    grids: list[Grid]  # frames of this rank, those of images first
    image_ranges: list[tuple[int, int]]  # start and end of their patches in the patches of all images
    video_ranges: list[tuple[int, int]]  # start and end of their patches in the patches of all videos
    num_tokens: int  # visual tokens of this rank
    max_tokens: int  # largest num_tokens of a rank; every rank pads its visual tokens to this length
    order: Tensor  # [G] index of each visual token of the pack in the gathered tokens [num_ranks * max_tokens]


def assign_frames(patches: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Assign frames to ranks so that their numbers of patches are similar: the largest frame first, greedily.

    Args:
        patches: Number of patches of each frame.
        num_ranks: Number of ranks.

    Returns:
        Indices of the frames of each rank, ascending.
    """
    frames_of_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for frame in sorted(range(len(patches)), key=lambda frame: (-patches[frame], frame)):
        rank = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        frames_of_rank[rank].append(frame)
        loads[rank] += patches[frame]
    return [sorted(frames) for frames in frames_of_rank]


def vision_shard(images: Sequence[Grid], videos: Sequence[Grid], merge: int, rank: int, num_ranks: int) -> VisionShard:
    """Compute the shard of one rank.

    Args:
        images: Patches along time, height and width of each image.
        videos: Patches along time, height and width of each video.
        merge: Side of a merge block in patches.
        rank: Rank in the group of tensor- and context-parallel ranks.
        num_ranks: Size of the group.
    """
    frames = [(height, width) for time, height, width in (*images, *videos) for _ in range(time)]
    num_image_frames = sum(time for time, _, _ in images)
    patches = [height * width for height, width in frames]
    ends = [0, *accumulate(patches)]
    num_image_patches = ends[num_image_frames]
    frames_of_rank = assign_frames(patches, num_ranks)
    tokens = [sum(patches[frame] for frame in part) // merge**2 for part in frames_of_rank]
    max_tokens = max(tokens)
    indices: dict[int, Tensor] = {}
    for index, part in enumerate(frames_of_rank):
        first = index * max_tokens
        for frame in part:
            indices[frame] = torch.arange(first, first + patches[frame] // merge**2)
            first += patches[frame] // merge**2
    own = frames_of_rank[rank]
    return VisionShard(
        grids=[(1, *frames[frame]) for frame in own],
        image_ranges=[(ends[frame], ends[frame + 1]) for frame in own if frame < num_image_frames],
        video_ranges=[
            (ends[frame] - num_image_patches, ends[frame + 1] - num_image_patches)
            for frame in own
            if frame >= num_image_frames
        ],
        num_tokens=tokens[rank],
        max_tokens=max_tokens,
        order=torch.cat([indices[frame] for frame in range(len(frames))]),
    )


def take_ranges(patches: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Concatenate ranges of patches along axis 0, [P, ...] -> [P of the shard, ...]."""
    return torch.cat([patches[:0], *(patches[start:end] for start, end in ranges)])


def spreading_wins(config: MindVLConfig, parallel: ParallelConfig, frames_per_pack: float = FRAMES_PER_PACK) -> bool:
    """Whether assigning images to ranks (`spread_images`) is estimated to be faster than splitting the vision encoder.

    With tensor parallelism a rank computes 1/tp of every layer for all frames, repeated on every cp rank, and each layer
    communicates the hidden states of all patches four times (two all-reduces each in forward and backward). With spread
    images a rank computes 1/(tp*cp) of the frames times the load imbalance, and visual tokens and their gradients are
    communicated once. The cost is memory: every tp rank holds the whole vision encoder and its float32 gradients.

    Args:
        config: Configuration of the model.
        parallel: Parallel layout.
        frames_per_pack: Mean number of images and video frames per pack; with fewer frames than ranks some ranks idle.
    """
    vision, num_ranks = config.vision, parallel.tp_size * parallel.cp_size
    if num_ranks == 1:
        return False
    if vision.num_heads % parallel.tp_size or vision.ffn_hidden_size % parallel.tp_size:
        return True  # the vision encoder cannot be split
    side = TOKENS_ALONG_SIDE * vision.spatial_merge_size
    patches = side * side
    work = pack_flops(config, (), [(1, side, side)])
    flops = (work.vision.total + work.projector.total) / patches
    # Largest load over mean load: with few frames some ranks have none, and frames differ in size.
    imbalance = max(1.0, num_ranks / frames_per_pack) + (num_ranks - 1) / (2 * max(num_ranks, frames_per_pack))
    bytes_split = 4 * 2 * vision.num_layers * vision.hidden_size * (parallel.tp_size > 1)
    bytes_spread = 2 * 2 * config.language.hidden_size / vision.spatial_merge_size**2
    time_split = flops / parallel.tp_size + bytes_split * FLOPS_PER_BYTE
    time_spread = flops / num_ranks * imbalance + bytes_spread * FLOPS_PER_BYTE
    return time_spread < time_split
