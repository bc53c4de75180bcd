# SPDX-License-Identifier: Apache-2.0
"""Attention inside the segments of a packed sequence: contract and reference.

One operator serves the vision encoder (full, or windowed by segments) and the language model (causal): they differ only
in the `Segments` and flags passed. Comes after rotary, before the output projection. Source: Vaswani et al.,
"Attention Is All You Need", 2017; grouped heads: Ainslie et al., "GQA", 2023.
"""

from typing import Literal, overload

import torch
from torch import Tensor

from .backend import chosen
from .cases import Case, Inputs, case_of
from .errors import OpsError
from .precision import compute_dtype
from .registry import register
from .segments import Segments

Window = tuple[int, int]


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    causal: bool,
    window: Window | None = None,
    scale: float | None = None,
    return_logsumexp: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    causal: bool,
    window: Window | None = None,
    scale: float | None = None,
    return_logsumexp: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    causal: bool,
    window: Window | None = None,
    scale: float | None = None,
    return_logsumexp: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention; a token sees only tokens of its own segment.

    Logits and softmax are computed in float32 at least; the probabilities may be rounded to the type of `query` before
    the sum over values, the result is rounded once. As for every operator of this package, the type of the tensors
    decides and autocast does not change it.

    Args:
        query: `[T, N, D]`.
        key: `[T, Nkv, D]`; `N` is a multiple of `Nkv`, neighbouring query heads share one key-value head.
            `Segments` with key lengths of their own have `key_total` keys.
        value: `[T, Nkv, Dv]`; `Dv` may differ from `D` (multi-latent attention: 192 and 128).
        segments: Their lengths add up to `T`.
        causal: A token sees itself and earlier tokens only.
        window: Tokens seen to the left and to the right, itself always included; -1 is no limit on that side.
        scale: Factor of the logits, `D ** -0.5` if not given.
        return_logsumexp: Also return the logarithm of the softmax denominator, from which partial results over
            pieces of the keys can be joined.

    Returns:
        `[T, N, Dv]`, in the type of `query`; with `return_logsumexp` also `[T, N]` float32 (float64 for float64), which
        carries no gradient.

    Raises:
        OpsError: Shapes or types that do not agree; queries before the first key under a mask.
    """
    _check(query, key, value, segments, causal, window)
    # A list is not hashable, and the window is part of a cache key.
    window = None if window is None else (window[0], window[1])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if segments.total == 0:  # no kernel takes an empty tensor; the sums keep the result in the graph of its inputs
        output = query.new_zeros(0, query.shape[1], value.shape[-1]) + 0 * (query.sum() + key.sum() + value.sum())
        sums = query.new_zeros(0, query.shape[1], dtype=compute_dtype(query))
        return (output, sums) if return_logsumexp else output
    result: tuple[Tensor, Tensor | None] = chosen("attention")(
        query, key, value, segments, causal=causal, window=window, scale=scale, return_logsumexp=return_logsumexp
    )
    output, logsumexp = result
    if not return_logsumexp:
        return output
    assert logsumexp is not None  # what a backend must return when it is asked
    return output, logsumexp


@register("attention", "reference")
def attention_reference(
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
    """One segment at a time, logits and softmax written out."""
    group = query.shape[1] // key.shape[1]
    outputs = [query.new_zeros(0, query.shape[1], value.shape[-1])]
    sums = [query.new_zeros(0, query.shape[1], dtype=compute_dtype(query))]
    pieces = query.split(segments.lengths), key.split(segments.key_lengths), value.split(segments.key_lengths)
    for q, k, v, offset in zip(*pieces, segments.offsets, strict=True):
        if not len(q):
            continue
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        logits = torch.einsum("qnd,knd->nqk", q, k).to(compute_dtype(q)) * scale
        blocked = blocked_mask(len(q), causal, window, q.device, key_length=len(k), offset=offset)
        logits = logits.masked_fill(blocked, float("-inf"))
        probabilities = logits.softmax(dim=-1).to(q.dtype)
        outputs.append(torch.einsum("nqk,knd->qnd", probabilities, v))
        sums.append(logits.detach().logsumexp(dim=-1).transpose(0, 1))
    return torch.cat(outputs), torch.cat(sums) if return_logsumexp else None


def blocked_mask(
    length: int,
    causal: bool,
    window: Window | None,
    device: torch.device,
    *,
    key_length: int | None = None,
    offset: int = 0,
) -> Tensor:
    """`[length, key_length]` bool, True where query row i (at key position `i + offset`) may not attend to key j."""
    left, right = window or (-1, -1)
    if causal:
        right = 0
    position = torch.arange(length, device=device) + offset
    distance = torch.arange(length if key_length is None else key_length, device=device) - position[:, None]
    blocked = torch.zeros(distance.shape, dtype=torch.bool, device=device)
    if left >= 0:
        blocked |= distance < -left
    if right >= 0:
        blocked |= distance > right
    return blocked


def _check(query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool, window: Window | None) -> None:
    if query.dim() != 3 or key.dim() != 3 or value.dim() != 3 or 0 in (query.shape[1], key.shape[1]):
        raise OpsError(
            f"attention: shapes {list(query.shape)}, {list(key.shape)}, {list(value.shape)} of query, key, value. Use "
            "[T, N, D], [T, Nkv, D], [T, Nkv, Dv]."
        )
    if not query.dtype == key.dtype == value.dtype:
        raise OpsError(
            f"attention: query is {query.dtype}, key {key.dtype}, value {value.dtype}. Give one type; autocast "
            "does not convert them."
        )
    for name, tensor, total in (("query", query, segments.total), ("key", key, segments.key_total)):
        if tensor.shape[0] != total:
            raise OpsError(
                f"attention: {name} has {tensor.shape[0]} tokens, segments add up to {total}. Make Segments from the "
                "cu_seqlens of this pack, padding included."
            )
    if key.shape[:2] != value.shape[:2] or key.shape[2] != query.shape[2]:
        raise OpsError(
            f"attention: query, key, value: shapes {list(query.shape)}, {list(key.shape)}, {list(value.shape)} do not "
            "agree. Use [T, N, D], [T, Nkv, D], [T, Nkv, Dv]."
        )
    if query.shape[1] % key.shape[1]:
        raise OpsError(
            f"attention: {query.shape[1]} query heads over {key.shape[1]} key-value heads. The first must be a "
            "multiple of the second."
        )
    _check_window(window)
    if (causal or window is not None) and min(segments.offsets, default=0) < 0:
        raise OpsError(
            f"attention: a segment has {-min(segments.offsets)} queries more than keys. Remove the first queries, or use full "
            "attention: causal and windowed attention need a key for every query."
        )


def _check_window(window: object) -> None:
    if window is None:
        return
    is_pair = isinstance(window, (tuple, list)) and len(window) == 2
    if not is_pair or any(type(side) is not int or side < -1 for side in window):  # type: ignore[attr-defined]
        raise OpsError(
            f"attention: window {window!r} is not (left, right). Give two integers: tokens seen to each side, 0 for "
            "none, -1 for no limit; for example (8, 0)."
        )


@case_of("attention")
def _case(inputs: Inputs) -> Case:
    tokens = inputs.tokens
    segments = Segments([tokens // 2, 1, 0, tokens - tokens // 2 - 1])
    heads = (inputs.normal(tokens, 4, 32), inputs.normal(tokens, 2, 32), inputs.normal(tokens, 2, 32))
    return Case(lambda q, k, v: attention(q, k, v, segments, causal=True), heads)
