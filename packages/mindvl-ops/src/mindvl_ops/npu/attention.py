# SPDX-License-Identifier: Apache-2.0
"""Packed attention on npu_fusion_attention: one call for vision and language, chosen by the segments.

Layout TND with lengths as Python ints, which `Segments` keeps for all layers; one shared mask. What the device would
refuse, or compute wrongly, is refused here first. Contract: NPU_CONTRACTS, section 2.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import Window
from ..errors import OpsError
from ..precision import compute_dtype
from ..registry import register
from ..segments import Segments
from .door import torch_npu
from .masks import Description, describe, shared_mask

MAX_WIDTH = 512  # of the gradient in TND; the forward kernel takes 768
MAX_HEADS = 256
MAX_SEGMENTS = 2048
MAX_TOKENS = 2**20
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
    """One kernel for the whole row; the gradients are the kernel's own."""
    width = value.shape[-1]
    if segments.total == 0:  # the kernel takes no empty tensor
        return query.new_zeros(0, query.shape[1], width), query.new_zeros(0, query.shape[1], dtype=compute_dtype(query))
    if width > query.shape[-1]:  # the kernel wants no value wider than the keys; zeros in both change no logit
        missing = (0, width - query.shape[-1])
        query, key = F.pad(query, missing), F.pad(key, missing)
    description = describe(segments, causal=causal, window=window)
    _check(query, key, segments, description)
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
    if not return_logsumexp:
        return output, None
    return output, (maximum + total.log())[..., 0].detach()  # eight columns that repeat one value


def _check(query: Tensor, key: Tensor, segments: Segments, description: Description) -> None:
    rules = (
        (query.dtype in DTYPES, f"type {query.dtype}", "Use bfloat16, float16 or float32"),
        (query.dtype == key.dtype, f"query {query.dtype} beside key {key.dtype}", "Give one type"),
        (query.shape[-1] <= MAX_WIDTH, f"head size {query.shape[-1]} over {MAX_WIDTH}", "Use smaller heads"),
        (query.shape[1] <= MAX_HEADS, f"{query.shape[1]} heads over {MAX_HEADS}", "Cut the heads over more ranks"),
        (
            len(description.query_ends) <= MAX_SEGMENTS,
            f"{len(description.query_ends)} segments over {MAX_SEGMENTS}",
            "Pack fewer samples into a row",
        ),
        (
            max(segments.total, segments.key_total) <= MAX_TOKENS,
            f"{max(segments.total, segments.key_total)} tokens over {MAX_TOKENS}",
            "Make the row shorter",
        ),
    )
    for holds, what, remedy in rules:
        if not holds:
            raise OpsError(f"{what}: the kernel does not take it. npu attention. {remedy}, or choose backend torch.")
