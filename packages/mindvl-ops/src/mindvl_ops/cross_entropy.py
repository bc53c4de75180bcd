# SPDX-License-Identifier: Apache-2.0
"""Loss of every token: contract and reference. Comes after the output layer; the sum is divided once, by the caller."""

import torch
from torch import Tensor

from .backend import chosen
from .precision import compute_dtype
from .registry import register

IGNORE_INDEX = -100  # this label is not learned


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log probability of each label.

    Args:
        logits: `[T, V]`.
        labels: `[T]` int64, already shifted; -100 is not learned.

    Returns:
        `[T]` float32, 0 where the label is -100.
    """
    result: Tensor = chosen("cross_entropy")(logits, labels)
    return result


@register("cross_entropy", "reference")
def cross_entropy_reference(logits: Tensor, labels: Tensor) -> Tensor:
    """The formula as written."""
    learned = labels != IGNORE_INDEX
    target = torch.where(learned, labels, 0)[:, None]
    log_probabilities = logits.to(compute_dtype(logits)).log_softmax(dim=-1)
    return torch.where(learned, -log_probabilities.gather(1, target)[:, 0], 0.0)
