# SPDX-License-Identifier: Apache-2.0
"""Packed attention on npu_fusion_attention: one call for vision and language, chosen by the segments.

Layout TND with lengths as Python ints, which `Segments` keeps for all layers; one shared mask. Inputs that the
device would reject or compute wrongly raise an error here. Contract: NPU_CONTRACTS, section 2.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import Window
from ..errors import OpsError
from ..registry import register
from ..segments import Segments
from ..torch_backend.derivatives import without_second_derivative
from .extension import torch_npu
from .masks import MAX_TOKENS, Description, describe, shared_mask

MAX_WIDTH = 512  # of the gradient in TND; the forward kernel takes 768
MAX_HEADS = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@register("attention", "npu")
def attention_npu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    causal: bool,
    window: Window | None,
    scale: float,
    return_logsumexp: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """One call for the whole pack, unless it has more segments than a call takes; gradients are the kernel's own."""
    width = value.shape[-1]
    if width > query.shape[-1]:  # the kernel requires values no wider than keys; zero padding of both changes no logit
        missing = (0, width - query.shape[-1])
        query, key = F.pad(query, missing), F.pad(key, missing)
    calls = describe(segments, causal=causal, window=window)
    _check(query, calls)
    parts = [_call(query, key, value, call, scale, return_logsumexp) for call in calls]
    if len(parts) == 1:
        return parts[0]
    sums = torch.cat([part for _, part in parts if part is not None]) if return_logsumexp else None
    return torch.cat([output for output, _ in parts]), sums


def _call(
    query: Tensor, key: Tensor, value: Tensor, description: Description, scale: float, return_logsumexp: bool
) -> tuple[Tensor, Tensor | None]:
    query = _part(query, description.query_range)
    key, value = _part(key, description.key_range), _part(value, description.key_range)
    output, maximum, total, *_ = torch_npu().npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1],
        "TND",
        atten_mask=shared_mask(query.device) if description.masked else None,
        scale=scale,  # the kernel's default is 1
        pre_tockens=description.pre_tokens,
        next_tockens=description.next_tokens,
        actual_seq_qlen=description.query_ends,
        actual_seq_kvlen=description.key_ends,
        sparse_mode=description.sparse_mode,
        softmax_layout="TND" if return_logsumexp else "",  # else the two lie in storage as [N, T]
    )
    output = without_second_derivative(output, "npu attention")
    if not return_logsumexp:
        return output, None
    return output, (maximum + total.log())[..., 0].detach()  # eight columns that repeat one value


def _part(x: Tensor, span: tuple[int, int]) -> Tensor:
    return x if span == (0, len(x)) else x[span[0] : span[1]]  # the gradient of a slice costs a copy


def _check(query: Tensor, calls: tuple[Description, ...]) -> None:
    longest = max(end - first for call in calls for first, end in (call.query_range, call.key_range))
    rules = (
        (query.dtype in DTYPES, f"type {query.dtype}", "Use bfloat16, float16 or float32"),
        (query.shape[-1] <= MAX_WIDTH, f"head size {query.shape[-1]} over {MAX_WIDTH}", "Use smaller heads"),
        (query.shape[1] <= MAX_HEADS, f"{query.shape[1]} heads over {MAX_HEADS}", "Cut the heads over more ranks"),
        (longest <= MAX_TOKENS, f"a segment of {longest} tokens over {MAX_TOKENS}", "Use shorter sequences"),
    )
    for holds, what, remedy in rules:
        if not holds:
            raise OpsError(f"npu attention: {what} is not supported by the kernel. {remedy}, or choose backend torch.")
