# SPDX-License-Identifier: Apache-2.0
"""Packed attention on scaled_dot_product_attention and on the variable-length flash kernel.

On CUDA in 16 bit the kernel of `torch.nn.attention.varlen` takes the packed sequence as it is; values that are narrower than
keys (multi-latent attention) are padded with zeros, because it wants one head size. Elsewhere its segments
are gathered into a few right-padded batches of similar length, one call each, and scattered back; a split pack (more keys
than queries) is computed segment by segment. Decisions and measurements: `docs/design/operators.md`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import Window, blocked_mask
from ..precision import compute_dtype
from ..registry import register
from ..segments import Segments
from .derivatives import without_second_derivative
from .padded import Gather, PaddedIndex, Scatter, bucket_mask, collect, padded_index

Result = tuple[Tensor, Tensor | None]


class Flags(NamedTuple):
    """The arguments besides the tensors."""

    causal: bool
    window: Window | None
    scale: float
    with_sums: bool


@register("attention", "torch")
def attention_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    causal: bool,
    window: Window | None,
    scale: float,
    return_logsumexp: bool = False,
) -> Result:
    """The fastest PyTorch path for this pack on this device."""
    width, flags = value.shape[-1], Flags(causal, window, scale, return_logsumexp)
    query, key, value = _one_width(query, key, value)
    if _varlen_fits(query, segments):
        output, sums = _varlen(query, key, value, segments, flags)
    elif segments.is_self:
        index = segments.derived(("padded", query.device), lambda: padded_index(segments, query.device))
        compute = _whole if index.is_view else _gathered
        output, sums = compute(index, query, key, value, segments, flags)
    else:
        output, sums = _by_segment(query, key, value, segments, flags)
    return output if output.shape[-1] == width else output[..., :width], sums


def _whole(
    index: PaddedIndex,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    flags: Flags,
) -> Result:
    """All segments have one length: the pack is a batch already."""
    bucket = index.buckets[0]
    q, k, v = (x.view(bucket.batch, bucket.length, *x.shape[1:]) for x in (query, key, value))
    mask = bucket_mask(segments, 0, bucket, flags.causal, flags.window, query)
    output, sums = _attend(q, k, v, mask, flags)
    return output.reshape(query.shape[0], query.shape[1], -1), None if sums is None else sums.flatten(0, 1)


def _gathered(
    index: PaddedIndex,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    flags: Flags,
) -> Result:
    """Batches of similar length."""
    gathered = Gather.apply(index, query, key, value)
    outputs, all_sums = [], []
    for i, bucket in enumerate(index.buckets):
        q, k, v = gathered[3 * i : 3 * i + 3]
        mask = bucket_mask(segments, i, bucket, flags.causal, flags.window, query)
        output, sums = _attend(q, k, v, mask, flags)
        outputs.append(output)
        all_sums.append(sums)
    packed: Tensor = Scatter.apply(index, *outputs)
    return packed, collect(index, tuple(x for x in all_sums if x is not None)) if flags.with_sums else None


def _by_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    flags: Flags,
) -> Result:
    """One call for each segment of a split pack, with a mask where one is needed."""
    outputs, all_sums = [], []
    pieces = query.split(segments.lengths), key.split(segments.key_lengths), value.split(segments.key_lengths)
    for q, k, v, offset in zip(*pieces, segments.offsets, strict=True):
        if not len(q):
            continue
        mask = None
        if flags.causal or flags.window is not None:
            mask = ~blocked_mask(len(q), flags.causal, flags.window, q.device, key_length=len(k), offset=offset)
        output, sums = _attend(q[None], k[None], v[None], mask, flags._replace(causal=False))
        outputs.append(output[0])
        all_sums.append(sums)
    return torch.cat(outputs), torch.cat([x[0] for x in all_sums if x is not None]) if flags.with_sums else None


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, flags: Flags) -> Result:
    """`[B, S, N, D]` in and out, sums `[B, S, N]`. `mask` is True at what is kept; without one the kernel is causal."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    group = q.shape[1] // k.shape[1]
    causal, scale = flags.causal and mask is None, flags.scale
    if not flags.with_sums:
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=group != 1
        )
        return output.transpose(1, 2), None
    if q.device.type == "cpu":  # the kernel behind the public function, which keeps the sums to itself
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        bias = None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
        output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
        return output.transpose(1, 2), sums.transpose(1, 2)
    output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=group != 1
    )
    return output.transpose(1, 2), _sums(q, k, mask, causal, scale).transpose(1, 2)


@torch.no_grad()
def _sums(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Log-sum-exp of the logits `[B, N, S]`, one head after the other so that few logits exist at once."""
    if causal:
        mask = ~blocked_mask(q.shape[2], True, None, q.device)
    group = q.shape[1] // k.shape[1]
    heads = []
    for head in range(q.shape[1]):
        logits = (q[:, head] @ k[:, head // group].transpose(1, 2)).to(compute_dtype(q)) * scale
        if mask is not None:
            logits = logits.masked_fill(~(mask[:, 0] if mask.dim() == 4 else mask), float("-inf"))
        heads.append(logits.logsumexp(dim=-1))
    return torch.stack(heads, dim=1)


def _one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The fused kernels want one head size; zeros at the end of the narrower ones change nothing."""
    missing = query.shape[-1] - value.shape[-1]
    if missing > 0:
        return query, key, F.pad(value, (0, missing))
    if missing < 0:
        return F.pad(query, (0, -missing)), F.pad(key, (0, -missing)), value
    return query, key, value


def _varlen_fits(query: Tensor, segments: Segments) -> bool:
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and segments.at_end  # the kernel puts the last query at the last key
    )


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    flags: Flags,
) -> Result:
    # pulls in the CUDA operator; only CUDA rows come here
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    left, right = flags.window or (-1, -1)
    result = varlen_attn(
        query,
        key,
        value,
        segments.cu_seqlens(query.device),
        segments.key_cu_seqlens(query.device),
        segments.max_length,
        segments.max_key_length,
        return_aux=AuxRequest(lse=True) if flags.with_sums else None,
        scale=flags.scale,
        window_size=(left, 0 if flags.causal else right),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if not flags.with_sums:
        assert isinstance(result, Tensor)  # only a request for extra results makes it a tuple
        return without_second_derivative(result, "attention"), None
    output, sums = result
    output = without_second_derivative(output, "attention")
    return output, sums.detach().transpose(0, 1)  # the kernel keeps [N, T]
