# SPDX-License-Identifier: Apache-2.0
"""Token loss in pieces: over rows where the logits are given, over the vocabulary where they are made here.

Only operators of PyTorch that every device has, so the npu backend uses the same functions.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cross_entropy import (
    IGNORE_INDEX,
    cross_entropy_reference,
    linear_cross_entropy_reference,
    loss_of_known_labels,
)
from ..precision import compute_dtype
from ..registry import register
from ..vocabulary import WHOLE, VocabularyShard, local_target
from .derivatives import gradients_of_reference, is_differentiated_again

# Values of logits that are worked on at once. On a CPU 4 MiB of float32, which stay in its cache: 40 % faster than 64
# MiB (benchmarks/decisions.py); on a device 64 MiB, which keep it busy.
_CHUNK_ELEMENTS = 2**20
_CHUNK_ELEMENTS_OF_DEVICE = 16 * 2**20
# Narrower pieces of the vocabulary make the matmuls slow.
_LEAST_COLUMNS = 256


@register("cross_entropy", "npu")  # torch_npu has no operator that needs as little memory
@register("cross_entropy", "torch")
def cross_entropy_torch(logits: Tensor, labels: Tensor, shard: VocabularyShard = WHOLE) -> Tensor:
    """Rows in chunks, so that no float32 copy of all logits is ever kept; PyTorch's own loss where one chunk is all."""
    if shard is WHOLE and logits.dtype in (torch.float32, torch.float64) and logits.numel() <= _elements(logits):
        _, here = local_target(labels, 0, logits.shape[1])
        known = torch.where(here, labels, IGNORE_INDEX)  # PyTorch would stop the device at any other label
        loss = F.cross_entropy(logits, known, reduction="none", ignore_index=IGNORE_INDEX)
        return loss_of_known_labels(loss, labels, here)
    chunked: Tensor = _ChunkedCrossEntropy.apply(logits, labels, shard)
    return chunked


@register("linear_cross_entropy", "npu")  # torch_npu has no operator that needs as little memory
@register("linear_cross_entropy", "torch")
def linear_cross_entropy_torch(
    hidden_states: Tensor, weight: Tensor, labels: Tensor, shard: VocabularyShard = WHOLE
) -> Tensor:
    """Pieces of the vocabulary, made in the forward pass and again in the backward pass."""
    loss: Tensor = _LinearCrossEntropy.apply(hidden_states, weight, labels, shard)
    return loss


def _elements(x: Tensor) -> int:
    return _CHUNK_ELEMENTS if x.device.type == "cpu" else _CHUNK_ELEMENTS_OF_DEVICE


def _joined(
    top: Tensor, total: Tensor, target: Tensor, here: Tensor, shard: VocabularyShard
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp, target logit and whether the label is known, each `[T]`, from those of this rank's ids."""
    highest = shard.maximum(top)
    total, target, known = shard.total(torch.stack((total * (top - highest).exp(), target, here.to(total.dtype))))
    return total.log() + highest, target, known > 0


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Keeps the logits as they came and one log-sum-exp per token; backward makes the softmax again."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, shard: VocabularyShard) -> Tensor:
        tokens, vocabulary = logits.shape
        dtype = compute_dtype(logits)
        ctx.rows = max(1, _elements(logits) // max(1, vocabulary))
        top, total = logits.new_empty(tokens, dtype=dtype), logits.new_empty(tokens, dtype=dtype)
        for start in range(0, tokens, ctx.rows):
            wide = logits[start : start + ctx.rows].to(dtype)
            highest = wide.amax(dim=-1)
            top[start : start + ctx.rows] = highest
            total[start : start + ctx.rows] = (wide - highest[:, None]).exp_().sum(dim=-1)
            del wide  # before the next one is made
        column, here = local_target(labels, shard.start, vocabulary)
        target = logits.gather(1, column[:, None])[:, 0].to(dtype).masked_fill_(~here, 0.0)
        log_sum, target, known = _joined(top, total, target, here, shard)
        ctx.save_for_backward(logits, labels, log_sum)
        ctx.shard = shard
        return loss_of_known_labels(log_sum - target, labels, known)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, log_sum = ctx.saved_tensors
        if is_differentiated_again():  # log_sum is a constant to autograd
            return gradients_of_reference(cross_entropy_reference, (logits, labels, ctx.shard), grad_loss)
        grad = torch.empty_like(logits)
        factor = grad_loss.masked_fill(labels == IGNORE_INDEX, 0.0)[:, None]
        column, here = local_target(labels, ctx.shard.start, logits.shape[1])
        for start in range(0, logits.shape[0], ctx.rows):
            rows = slice(start, start + ctx.rows)
            in_place = grad[rows] if grad.dtype == log_sum.dtype else None
            piece = _minus_target(logits[rows], log_sum[rows], column[rows], here[rows], in_place).mul_(factor[rows])
            if in_place is None:
                grad[rows] = piece
            del piece
        return grad, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """Keeps the inputs and one log-sum-exp per token.

    The vocabulary is cut and not the rows: each piece of the weight gets its whole gradient from one matmul, with
    nothing to accumulate in 16 bit; only the gradient of the hidden states is a sum, kept in float32.
    """

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weight: Tensor, labels: Tensor, shard: VocabularyShard) -> Tensor:
        tokens, vocabulary = hidden_states.shape[0], weight.shape[0]
        dtype = compute_dtype(hidden_states)
        ctx.columns = max(_LEAST_COLUMNS, _elements(hidden_states) // max(1, tokens))
        top = hidden_states.new_full((tokens,), float("-inf"), dtype=dtype)
        total, target = torch.zeros_like(top), torch.zeros_like(top)
        for start in range(0, vocabulary, ctx.columns):
            piece = weight[start : start + ctx.columns]
            logits = (hidden_states @ piece.T).to(dtype)
            column, here = local_target(labels, shard.start + start, piece.shape[0])
            target += logits.gather(1, column[:, None])[:, 0].masked_fill_(~here, 0.0)
            highest = torch.maximum(top, logits.amax(dim=-1))
            total = total * (top - highest).exp() + logits.sub_(highest[:, None]).exp_().sum(dim=-1)
            top = highest
            del logits
        _, here = local_target(labels, shard.start, vocabulary)
        log_sum, target, known = _joined(top, total, target, here, shard)
        ctx.save_for_backward(hidden_states, weight, labels, log_sum)
        ctx.shard = shard
        return loss_of_known_labels(log_sum - target, labels, known)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, weight, labels, log_sum = ctx.saved_tensors
        if is_differentiated_again():  # log_sum is a constant to autograd
            inputs = hidden_states, weight, labels, ctx.shard
            return gradients_of_reference(linear_cross_entropy_reference, inputs, grad_loss)
        factor = grad_loss.masked_fill(labels == IGNORE_INDEX, 0.0)[:, None]
        grad_hidden = torch.zeros_like(hidden_states, dtype=log_sum.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, weight.shape[0], ctx.columns):
            piece = weight[start : start + ctx.columns]
            column, here = local_target(labels, ctx.shard.start + start, piece.shape[0])
            grad = _minus_target(hidden_states @ piece.T, log_sum, column, here).mul_(factor).to(hidden_states.dtype)
            if grad_hidden is not None:
                grad_hidden += grad @ piece
            if grad_weight is not None:
                torch.mm(grad.T, hidden_states, out=grad_weight[start : start + ctx.columns])
            del grad
        return None if grad_hidden is None else grad_hidden.to(hidden_states.dtype), grad_weight, None, None


def _minus_target(logits: Tensor, log_sum: Tensor, column: Tensor, here: Tensor, out: Tensor | None = None) -> Tensor:
    """Softmax of a piece of logits, less one at the label where it is here; into `out` if given."""
    softmax = torch.sub(logits.to(log_sum.dtype), log_sum[:, None], out=out).exp_()
    return softmax.scatter_add_(1, column[:, None], -here.to(softmax.dtype)[:, None])
