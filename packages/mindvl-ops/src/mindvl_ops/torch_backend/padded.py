# SPDX-License-Identifier: Apache-2.0
"""A packed sequence as a few right-padded batches of segments of similar length, and back.

The index (which token goes where) is made once per `Segments` and shared by all layers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention import Window, blocked_mask
from ..segments import Segments
from ..staging import to_device

# A batch takes segments down to this share of its longest one: at least the square of it is useful work in the logits.
# Measured by benchmarks/attention.py: 0.8 to 0.95 are alike, 0.5 is 20 % slower, exact lengths only are 30 % slower.
_BUCKET_RATIO = 0.85
# Below this length a separate call costs more than the padding it saves.
_SMALL_SEGMENT = 8


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Segments of similar length, as one padded batch of shape [batch, length]."""

    batch: int
    length: int
    token_index: Tensor  # [batch * length] int64, token of each place; padding repeats the segment's own last token
    keep: Tensor | None  # [batch, length] bool, False at padding; None when there is none


@dataclass(frozen=True, kw_only=True)
class PaddedIndex:
    """Where every token of a pack goes in the padded batches, and the inverse."""

    buckets: tuple[Bucket, ...]
    place: Tensor  # [T] int64, position of each token in the buckets laid end to end
    is_view: bool  # all segments have one length and are in order: a reshape does it


def padded_index(segments: Segments, device: torch.device) -> PaddedIndex:
    """Group segments by length, longest first, and index their tokens."""
    lengths = torch.tensor(segments.lengths, dtype=torch.int64)
    starts = lengths.cumsum(0) - lengths
    place = torch.empty(segments.total, dtype=torch.int64)
    buckets = []
    offset = 0
    groups = group_by_length(segments.lengths)
    for members in groups:
        index = torch.tensor(members, dtype=torch.int64)
        size, start = lengths[index], starts[index]
        length = int(size.max())
        column = torch.arange(length)
        keep = column < size[:, None]  # [batch, length]
        tokens = start[:, None] + torch.minimum(column, size[:, None] - 1)
        place[tokens[keep]] = offset + keep.flatten().nonzero()[:, 0]
        offset += keep.numel()
        bucket = Bucket(
            batch=len(members),
            length=length,
            token_index=to_device(tokens.flatten(), device),
            keep=None if bool(keep.all()) else to_device(keep, device),
        )
        buckets.append(bucket)
    is_view = len(groups) == 1 and buckets[0].keep is None
    return PaddedIndex(buckets=tuple(buckets), place=to_device(place, device), is_view=is_view)


def group_by_length(lengths: tuple[int, ...]) -> list[list[int]]:
    """Segment numbers in groups of similar length, each group in the order of the pack; empty segments are left out."""
    groups: list[list[int]] = []
    longest = 0
    for number in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i]):
        if not groups or lengths[number] < min(_BUCKET_RATIO * longest, longest - _SMALL_SEGMENT):
            groups.append([])
            longest = lengths[number]
        groups[-1].append(number)
    return [sorted(group) for group in groups]


def bucket_mask(
    segments: Segments, number: int, bucket: Bucket, causal: bool, window: Window | None, query: Tensor
) -> Tensor | None:
    """Keep-mask of a bucket. Causal batches padded on the right need none: no real token looks right."""
    if window is None and (causal or bucket.keep is None):
        return None

    def make() -> Tensor:
        keep = None if bucket.keep is None else bucket.keep[:, None, None, :]
        if window is None:
            assert keep is not None
            return keep
        inside = ~blocked_mask(bucket.length, causal, window, query.device)
        # padded queries would have no key at all under a window; their results are dropped, so they attend to themselves
        return (
            inside
            if keep is None
            else (inside & keep) | torch.eye(bucket.length, dtype=torch.bool, device=query.device)
        )

    return segments.derived(("mask", query.device, number, causal, window), make)


class Gather(torch.autograd.Function):
    """Packed query, key, value -> padded batches. Padding gets no gradient, so backward is a gather too."""

    @staticmethod
    def forward(ctx: Any, index: PaddedIndex, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.index = index
        return tuple(
            x.index_select(0, bucket.token_index).view(bucket.batch, bucket.length, *x.shape[1:])
            for bucket in index.buckets
            for x in tensors
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        num_tensors = len(grads) // len(ctx.index.buckets)
        return None, *(collect(ctx.index, grads[i::num_tensors]) for i in range(num_tensors))


class Scatter(torch.autograd.Function):
    """Padded batches -> packed sequence; padding is dropped."""

    @staticmethod
    def forward(ctx: Any, index: PaddedIndex, *outputs: Tensor) -> Tensor:
        ctx.index = index
        return collect(index, outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = []
        for bucket in ctx.index.buckets:
            padded = grad.index_select(0, bucket.token_index).view(bucket.batch, bucket.length, *grad.shape[1:])
            if bucket.keep is not None:
                padded.masked_fill_(~bucket.keep[:, :, None, None], 0.0)
            grads.append(padded)
        return None, *grads


def collect(index: PaddedIndex, padded: tuple[Tensor, ...]) -> Tensor:
    flat = [x.reshape(-1, *x.shape[2:]) for x in padded]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).index_select(0, index.place)
