# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values of grouped-query attention from one projection: split, normalized, rotated. Contract and reference.

Comes after the projection of a layer, before `attention`. One operator because the three steps only move data: a kernel
that does them together reads the projection once and writes each head once.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .angles import rotary_tables
from .backend import chosen
from .cases import Case, Inputs, case_of, joined
from .errors import OpsError
from .norm import rms_norm_reference
from .registry import register
from .rope import rotary_reference


class HeadNorms(NamedTuple):
    """RMSNorm of every query head and of every key head."""

    query_weight: Tensor  # [D]
    key_weight: Tensor  # [D]
    eps: float


Heads = tuple[Tensor, Tensor, Tensor]


def rotary_qkv(qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None) -> Heads:
    """Split a projection into heads; normalize and rotate queries and keys.

    Two roundings for queries and keys with norms, one without: the norm is rounded before it is rotated, so that the
    result equals `rms_norm` and `rotary` one after the other in every backend.

    Args:
        qkv: `[T, Nkv, (N / Nkv + 2) * D]`: for each key-value head its query heads, the key and the value.
        cos, sin: `[T, D]` float32, constants, as for `rotary` in half style.
        norms: Norms of the heads, or None if the layer has none.

    Returns:
        Query `[T, N, D]`, key and value `[T, Nkv, D]`, in the type of `qkv`.

    Raises:
        OpsError: Shapes that do not agree.
    """
    width = cos.shape[-1]
    if qkv.dim() != 3 or cos.shape != sin.shape or len(cos) != len(qkv) or width % 2:
        raise OpsError(
            f"rotary_qkv: qkv has shape {list(qkv.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}. Give qkv "
            "[T, Nkv, (N / Nkv + 2) * D], and cos and sin [T, D] with an even D."
        )
    if qkv.shape[2] % width or qkv.shape[2] < 3 * width:
        raise OpsError(
            f"rotary_qkv: qkv has shape {list(qkv.shape)}, heads of {width} values. The last axis must hold at least "
            "one query head, the key and the value of each group."
        )
    if norms is not None and any(weight.shape != (width,) for weight in norms[:2]):
        raise OpsError(
            f"rotary_qkv: norms: weights of shape {list(norms.query_weight.shape)} and {list(norms.key_weight.shape)}, "
            f"heads of {width} values. Give weights [D]."
        )
    heads: Heads = chosen("rotary_qkv")(qkv, cos, sin, norms)
    return heads


def split_heads(qkv: Tensor, width: int) -> Heads:
    """Query `[T, N, D]`, key and value `[T, Nkv, D]` of a projection `[T, Nkv, (N / Nkv + 2) * D]`."""
    heads = qkv.shape[2] // width - 2  # query heads of one group
    query, key, value = qkv.split((heads * width, width, width), dim=2)
    return query.reshape(query.shape[0], query.shape[1] * heads, width), key, value


def one_after_the_other(
    rms_norm: Callable[[Tensor, Tensor, float], Tensor],
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor],
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms | None,
) -> Heads:
    """The operator composed of a norm and a rotation of the same backend."""
    query, key, value = split_heads(qkv, cos.shape[-1])
    if norms is not None:
        query = rms_norm(query, norms.query_weight, norms.eps)
        key = rms_norm(key, norms.key_weight, norms.eps)
    return rotary(query, cos, sin), rotary(key, cos, sin), value


@register("rotary_qkv", "reference")
def rotary_qkv_reference(qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None) -> Heads:
    """The three steps as written."""
    return one_after_the_other(rms_norm_reference, rotary_reference, qkv, cos, sin, norms)


@case_of("rotary_qkv")
def _case(inputs: Inputs) -> Case:
    def heads(qkv: Tensor, query_weight: Tensor, key_weight: Tensor) -> Tensor:
        cos, sin = rotary_tables(torch.arange(len(qkv), device=qkv.device), 32, 10000.0)
        return joined(rotary_qkv(qkv, cos, sin, HeadNorms(query_weight, key_weight, 1e-6)))

    return Case(heads, (inputs.normal(inputs.tokens, 2, 4 * 32), inputs.normal(32), inputs.normal(32)))
