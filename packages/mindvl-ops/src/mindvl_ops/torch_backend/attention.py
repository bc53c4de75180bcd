# SPDX-License-Identifier: Apache-2.0
"""Packed attention on scaled_dot_product_attention.

Segments of a row are gathered into a few right-padded batches of similar length, one SDPA call each, and put back.
The plan (which token goes where) is made once per `Segments` and shared by all layers. On CUDA in 16 bit the
variable-length flash kernel of PyTorch takes the packed row as it is.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import Window, blocked_mask
from ..registry import register
from ..segments import Segments

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
class Plan:
    """Where every token of a row goes, and how to come back."""

    buckets: tuple[Bucket, ...]
    place: Tensor  # [T] int64, place of each token in the buckets laid end to end
    is_view: bool  # all segments have one length and are in order: a reshape does it


@register("attention", "torch")
def attention_torch(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, causal: bool, window: Window | None, scale: float
) -> Tensor:
    """Fastest path that PyTorch has for this row on this device."""
    if segments.total == 0:
        return query.new_zeros(0, query.shape[1], value.shape[-1])
    if _flash_varlen_fits(query, value):
        return _flash_varlen(query, key, value, segments, causal, window, scale)
    width = value.shape[-1]
    if width < query.shape[-1]:  # the fused CPU kernel wants one head size; zeros in the value change nothing
        value = F.pad(value, (0, query.shape[-1] - width))
    plan = segments.derived(("plan", query.device), lambda: make_plan(segments, query.device))
    if plan.is_view:
        bucket = plan.buckets[0]
        q, k, v = (x.view(bucket.batch, bucket.length, *x.shape[1:]) for x in (query, key, value))
        output = _attend(q, k, v, _mask(segments, 0, bucket, causal, window, query), causal, scale)
        output = output.reshape(query.shape[0], query.shape[1], -1)
    else:
        gathered = _Gather.apply(plan, query, key, value)
        outputs = []
        for i, bucket in enumerate(plan.buckets):
            q, k, v = gathered[3 * i : 3 * i + 3]
            outputs.append(_attend(q, k, v, _mask(segments, i, bucket, causal, window, query), causal, scale))
        output = _Scatter.apply(plan, *outputs)
    return output[..., :width]


def make_plan(segments: Segments, device: torch.device) -> Plan:
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
            token_index=tokens.flatten().to(device),
            keep=None if bool(keep.all()) else keep.to(device),
        )
        buckets.append(bucket)
    is_view = len(groups) == 1 and buckets[0].keep is None
    return Plan(buckets=tuple(buckets), place=place.to(device), is_view=is_view)


def group_by_length(lengths: tuple[int, ...]) -> list[list[int]]:
    """Segment numbers in groups of similar length, each group in the order of the row; empty segments are left out."""
    groups: list[list[int]] = []
    longest = 0
    for number in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i]):
        if not groups or lengths[number] < min(_BUCKET_RATIO * longest, longest - _SMALL_SEGMENT):
            groups.append([])
            longest = lengths[number]
        groups[-1].append(number)
    return [sorted(group) for group in groups]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """`[B, S, N, D]` in and out. Without a mask, `causal` is left to the kernel."""
    output = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return output.transpose(1, 2)


def _mask(
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
        # padded queries would have no key at all under a window; they are thrown away, so let them see themselves
        return (
            inside
            if keep is None
            else (inside & keep) | torch.eye(bucket.length, dtype=torch.bool, device=query.device)
        )

    return segments.derived(("mask", query.device, number, causal, window), make)


class _Gather(torch.autograd.Function):
    """Packed query, key, value -> padded batches. Padding gets no gradient, so backward is a gather too."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan = plan
        return tuple(
            x.index_select(0, bucket.token_index).view(bucket.batch, bucket.length, *x.shape[1:])
            for bucket in plan.buckets
            for x in tensors
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        num_tensors = len(grads) // len(ctx.plan.buckets)
        return None, *(_collect(ctx.plan, grads[i::num_tensors]) for i in range(num_tensors))


class _Scatter(torch.autograd.Function):
    """Padded batches -> packed row; padding is dropped."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *outputs: Tensor) -> Tensor:
        ctx.plan = plan
        return _collect(plan, outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = []
        for bucket in ctx.plan.buckets:
            padded = grad.index_select(0, bucket.token_index).view(bucket.batch, bucket.length, *grad.shape[1:])
            if bucket.keep is not None:
                padded.masked_fill_(~bucket.keep[:, :, None, None], 0.0)
            grads.append(padded)
        return None, *grads


def _collect(plan: Plan, padded: tuple[Tensor, ...]) -> Tensor:
    rows = [x.reshape(-1, *x.shape[2:]) for x in padded]
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).index_select(0, plan.place)


def _flash_varlen_fits(query: Tensor, value: Tensor) -> bool:
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
    )


def _flash_varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool, window: Window | None, scale: float
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # pulls in the CUDA operator; only CUDA rows come here

    left, right = window or (-1, -1)
    bounds = segments.cu_seqlens(query.device)
    output = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        segments.max_length,
        segments.max_length,
        scale=scale,
        window_size=(left, 0 if causal else right),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)  # only a request for extra results makes it a tuple
    return output
