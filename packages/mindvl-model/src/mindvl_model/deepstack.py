# SPDX-License-Identifier: Apache-2.0
"""Add deepstack features of the vision encoder to the outputs of the first layers of the language model.

Runs between the projector and the language model, and between pipeline stages, whose messages carry the features of later
layers. Source: DeepStack, arXiv 2406.04334.
"""

from typing import Any

import torch
from torch import Tensor


def split_message(message: Tensor, num_features: int) -> tuple[Tensor, list[Tensor]]:
    """Hidden states [S, 1, H] and features of a message [(1 + num_features)*S, 1, H] between pipeline stages."""
    hidden, *features = message.chunk(1 + num_features)
    return hidden, features


def join_message(hidden: Tensor, features: list[Tensor], num_features: int) -> Tensor:
    """The message of hidden states and features [S, 1, H] each, filled up with zeros."""
    if not num_features:
        return hidden
    zeros = [torch.zeros_like(hidden)] * (num_features - len(features))
    return torch.cat((hidden, *features[:num_features], *zeros))


def attach(embeddings: Tensor, features: list[Tensor], added_after: dict[int, Tensor], first_layer: int = 1) -> Tensor:
    """Put features where the layers find them, and return embeddings that pass their gradients on.

    The recomputation of megatron-core runs the backward pass of a layer on its own, and would enter the graph of a tensor
    that is not an argument of the layer once for each layer. So the layers add leaf tensors, and the gradients of these
    continue to the vision encoder with the gradient of the embeddings, which is the last of the language model.

    Args:
        embeddings: [S, 1, H], the input of the first layer.
        features: [S, 1, H] each, zero at text.
        added_after: Receives the leaf tensors by layer number (PackedSequence).
        first_layer: Number of the layer after which the first feature is added.
    """
    leaves = [feature.detach().requires_grad_(feature.requires_grad) for feature in features]
    added_after.update(enumerate(leaves, start=first_layer))
    if not torch.is_grad_enabled() or not any(feature.requires_grad for feature in features):
        return embeddings
    attached: Tensor = _Attached.apply(embeddings, leaves, *features)
    return attached


class _Attached(torch.autograd.Function):
    """The identity of the embeddings; its backward pass also returns the gradients of the leaves."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, leaves: list[Tensor], *features: Tensor) -> Tensor:
        ctx.leaves = leaves
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        taken = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in ctx.leaves]
        for leaf in ctx.leaves:
            leaf.grad = None
        return gradients[0], None, *taken
