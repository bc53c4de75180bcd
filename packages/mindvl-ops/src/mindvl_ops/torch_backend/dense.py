# SPDX-License-Identifier: Apache-2.0
"""Patch embedding and token loss on PyTorch's own kernels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cross_entropy import IGNORE_INDEX
from ..registry import register

# float32 values of logits that may exist at once when the logits themselves are 16 bit: 256 MiB
_CHUNK_ELEMENTS = 64 * 2**20


@register("patch_embed", "torch")
def patch_embed_torch(patches: Tensor, weight: Tensor) -> Tensor:
    """One matmul."""
    return F.linear(patches, weight)


@register("cross_entropy", "torch")
def cross_entropy_torch(logits: Tensor, labels: Tensor) -> Tensor:
    """PyTorch's loss for wide logits; in 16 bit, rows in chunks so that no float32 copy of all logits is ever kept."""
    if logits.dtype in (torch.float32, torch.float64):
        return F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_INDEX)
    loss: Tensor = _ChunkedCrossEntropy.apply(logits, labels)
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Keeps the 16-bit logits and one log-sum-exp per token; backward makes the softmax again, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        rows = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1]))
        target = labels.clamp(min=0)[:, None]
        log_sums = [chunk.float().logsumexp(dim=-1) for chunk in logits.split(rows)]
        log_sum = torch.cat(log_sums) if log_sums else logits.new_zeros(0, dtype=torch.float32)
        ctx.save_for_backward(logits, labels, log_sum)
        ctx.rows = rows
        loss = log_sum - logits.gather(1, target)[:, 0].float()
        return loss.masked_fill_(labels == IGNORE_INDEX, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None]:
        logits, labels, log_sum = ctx.saved_tensors
        grad = torch.empty_like(logits)
        factor = grad_loss.masked_fill(labels == IGNORE_INDEX, 0.0)[:, None]
        target = labels.clamp(min=0)[:, None]
        for start in range(0, logits.shape[0], ctx.rows):
            rows = slice(start, start + ctx.rows)
            softmax = (logits[rows].float() - log_sum[rows, None]).exp_()
            softmax.scatter_add_(1, target[rows], softmax.new_full((softmax.shape[0], 1), -1.0))
            grad[rows] = softmax.mul_(factor[rows])
        return grad, None
