# SPDX-License-Identifier: Apache-2.0
"""Which frames of a pack each tensor- and context-parallel peer encodes, and whether that is faster than splitting.

Comes after the batch's grids, before positions.py plans what is left for this peer. Host arithmetic from the grids
alone, so that all peers, which hold the same pack, agree without a message. An image is one frame; attention of the
vision encoder never crosses frames, so a video can be taken apart.
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

FLOPS_PER_BYTE = 2000.0  # what a device computes while it sends one byte to a neighbour: 400 TFLOP/s at 200 GB/s
FRAMES_PER_PACK = 8.0  # images of about a thousand visual tokens in a pack of 8,192
TOKENS_ALONG_SIDE = 32  # visual tokens along each side of such an image


@dataclass(frozen=True)
class PeerPart:
    """What one peer encodes of a pack, and where everybody's visual tokens go."""

    grids: list[Grid]  # its frames, those of images first
    image_ranges: list[tuple[int, int]]  # first and end of its patches among those of all images
    video_ranges: list[tuple[int, int]]  # and of all videos
    num_tokens: int  # visual tokens of this peer
    slot: int  # of the peer with the most: gathered parts have this length each
    order: Tensor  # [G] where each visual token of the pack lies in what was gathered, [peers * slot]


def deal_frames(patches: Sequence[int], num_peers: int) -> list[list[int]]:
    """Frames of each peer, ascending, with sums of patches as equal as dealing out the largest first makes them."""
    parts: list[list[int]] = [[] for _ in range(num_peers)]
    loads = [0] * num_peers
    for frame in sorted(range(len(patches)), key=lambda frame: (-patches[frame], frame)):
        peer = min(range(num_peers), key=lambda peer: (loads[peer], peer))
        parts[peer].append(frame)
        loads[peer] += patches[frame]
    return [sorted(part) for part in parts]


def plan_peer(images: Sequence[Grid], videos: Sequence[Grid], merge: int, peer: int, num_peers: int) -> PeerPart:
    """The part of one peer.

    Args:
        images, videos: Patches along time, height and width of each.
        merge: Side of the block of patches that becomes one visual token.
    """
    frames = [(height, width) for time, height, width in (*images, *videos) for _ in range(time)]
    num_image_frames = sum(time for time, _, _ in images)
    patches = [height * width for height, width in frames]
    ends = [0, *accumulate(patches)]
    num_image_patches = ends[num_image_frames]
    parts = deal_frames(patches, num_peers)
    tokens = [sum(patches[frame] for frame in part) // merge**2 for part in parts]
    slot = max(tokens)
    pieces: dict[int, Tensor] = {}
    for place, part in enumerate(parts):
        first = place * slot
        for frame in part:
            pieces[frame] = torch.arange(first, first + patches[frame] // merge**2)
            first += patches[frame] // merge**2
    own = parts[peer]
    return PeerPart(
        grids=[(1, *frames[frame]) for frame in own],
        image_ranges=[(ends[frame], ends[frame + 1]) for frame in own if frame < num_image_frames],
        video_ranges=[
            (ends[frame] - num_image_patches, ends[frame + 1] - num_image_patches)
            for frame in own
            if frame >= num_image_frames
        ],
        num_tokens=tokens[peer],
        slot=slot,
        order=torch.cat([pieces[frame] for frame in range(len(frames))]),
    )


def take_ranges(patches: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Packs of these ranges end to end, [P, ...] -> [P of the part, ...]."""
    return torch.cat([patches[:0], *(patches[start:end] for start, end in ranges)])


def spreading_wins(config: MindVLConfig, parallel: ParallelConfig, frames_per_pack: float = FRAMES_PER_PACK) -> bool:
    """Whether each peer should encode a part of the images instead of a part of each layer.

    Split, a tp rank computes 1/tp of every layer and every cp rank all of it again; each layer sends the hidden states
    of all patches four times (two sums forward, two backward). Spread, a peer computes 1/(tp*cp) of the frames, times
    what the fullest has more than the mean, and the visual tokens are gathered once and their gradients once. The
    price is memory: every tp rank holds the whole vision encoder with its gradients, in the type of training and float32.

    Args:
        frames_per_pack: Images and frames of videos in one pack; with fewer than peers some have nothing to do.
    """
    vision, peers = config.vision, parallel.tp_size * parallel.cp_size
    if peers == 1:
        return False
    if vision.num_heads % parallel.tp_size or vision.ffn_hidden_size % parallel.tp_size:
        return True  # the vision encoder cannot be split at all
    side = TOKENS_ALONG_SIDE * vision.spatial_merge_size
    patches = side * side
    work = pack_flops(config, (), [(1, side, side)])
    flops = (work.vision.total + work.projector.total) / patches
    # Of the mean: some have no frame where there are fewer than peers, and frames differ in size.
    fullest = max(1.0, peers / frames_per_pack) + (peers - 1) / (2 * max(peers, frames_per_pack))
    bytes_split = 4 * 2 * vision.num_layers * vision.hidden_size * (parallel.tp_size > 1)
    bytes_spread = 2 * 2 * config.language.hidden_size / vision.spatial_merge_size**2
    time_split = flops / parallel.tp_size + bytes_split * FLOPS_PER_BYTE
    time_spread = flops / peers * fullest + bytes_spread * FLOPS_PER_BYTE
    return time_spread < time_split
