# SPDX-License-Identifier: Apache-2.0
"""Attention inside the segments of a packed row: contract and reference.

One operator serves the vision tower (full, or windowed by segments) and the language model (causal): what differs is
the `Segments` and the flags it is given. Comes after rotary, before the output projection.
"""

import torch
from torch import Tensor

from .backend import chosen
from .errors import OpsError
from .precision import compute_dtype
from .registry import register
from .segments import Segments

Window = tuple[int, int]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    causal: bool,
    window: Window | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention; a token sees only tokens of its own segment.

    Args:
        query: `[T, N, D]`.
        key: `[T, Nkv, D]`; `N` is a multiple of `Nkv`, neighbouring query heads share one key-value head.
        value: `[T, Nkv, Dv]`; `Dv` may differ from `D`.
        segments: Their lengths add up to `T`.
        causal: A token sees itself and earlier tokens only.
        window: Tokens seen to the left and to the right, itself always included; -1 is no limit on that side.
        scale: Factor of the logits, `D ** -0.5` if not given.

    Returns:
        `[T, N, Dv]`, in the type of `query`.
    """
    _check(query, key, value, segments, window)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    result: Tensor = chosen("attention")(query, key, value, segments, causal=causal, window=window, scale=scale)
    return result


@register("attention", "reference")
def attention_reference(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, causal: bool, window: Window | None, scale: float
) -> Tensor:
    """One segment at a time, logits and softmax written out."""
    group = query.shape[1] // key.shape[1]
    outputs = [query.new_zeros(0, query.shape[1], value.shape[-1])]
    pieces = (tensor.split(segments.lengths) for tensor in (query, key, value))
    for q, k, v in zip(*pieces, strict=True):
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        logits = torch.einsum("qnd,knd->nqk", q, k) * scale
        logits = logits.masked_fill(blocked_mask(len(q), causal, window, q.device), float("-inf"))
        probabilities = logits.softmax(dim=-1, dtype=compute_dtype(q)).to(q.dtype)
        outputs.append(torch.einsum("nqk,knd->qnd", probabilities, v))
    return torch.cat(outputs)


def blocked_mask(length: int, causal: bool, window: Window | None, device: torch.device) -> Tensor:
    """`[length, length]` bool, True where query row i may not attend to key column j."""
    left, right = window or (-1, -1)
    if causal:
        right = 0
    position = torch.arange(length, device=device)
    distance = position[None, :] - position[:, None]  # j - i
    blocked = torch.zeros(length, length, dtype=torch.bool, device=device)
    if left >= 0:
        blocked |= distance < -left
    if right >= 0:
        blocked |= distance > right
    return blocked


def _check(query: Tensor, key: Tensor, value: Tensor, segments: Segments, window: Window | None) -> None:
    if query.shape[0] != segments.total:
        raise OpsError(
            f"query has {query.shape[0]} tokens, segments add up to {segments.total}. attention. Make "
            "Segments from the cu_seqlens of this row, padding included."
        )
    if key.shape[:2] != value.shape[:2] or key.shape[0] != query.shape[0] or key.shape[2] != query.shape[2]:
        raise OpsError(
            f"shapes {list(query.shape)}, {list(key.shape)}, {list(value.shape)} do not agree. attention: "
            "query, key, value. Use [T, N, D], [T, Nkv, D], [T, Nkv, Dv]."
        )
    if query.shape[1] % key.shape[1]:
        raise OpsError(
            f"{query.shape[1]} query heads over {key.shape[1]} key-value heads. attention. The first must "
            "be a multiple of the second."
        )
    if window is not None and min(window) < -1:
        raise OpsError(f"window {window} has a side below -1. attention. Use -1 for no limit, 0 for itself only.")
