# SPDX-License-Identifier: Apache-2.0
"""Loss of every token, from logits or from hidden states and the output weight: contracts and references.

Comes after the last layer; the sum is divided once, by the caller. Both work on a piece of the vocabulary as well.
Sources of the two ideas: Shoeybi et al., "Megatron-LM", 2019, section 3 (vocabulary-parallel loss); Wijmans et al.,
"Cut Your Losses in Large-Vocabulary Language Models", 2024 (no logits of the whole vocabulary).
"""

import torch
from torch import Tensor

from .backend import chosen
from .cases import Case, Inputs, case_of
from .errors import OpsError
from .precision import compute_dtype
from .registry import register
from .vocabulary import WHOLE, SumOverRanks, VocabularyShard, local_target

IGNORE_INDEX = -100  # a position with this label has no loss


def cross_entropy(logits: Tensor, labels: Tensor, *, shard: VocabularyShard = WHOLE) -> Tensor:
    """Negative log probability of each label.

    A label is -100 or a token id in `[0, V)`. The caller checks this on the host, as mindvl_data does
    once per pack: an operator that raised would have to synchronize with the device. The loss of any other label is NaN,
    on every backend, so that it cannot be trained on unnoticed.

    Args:
        logits: `[T, V]`, or this rank's `[T, V/tp]` with `shard`.
        labels: `[T]` int64, already shifted, ids of the whole vocabulary; -100 has no loss and no gradient.
        shard: Which piece of the vocabulary this is; the whole if not given.

    Returns:
        `[T]` float32 (float64 for float64), 0 where the label is -100; the same on every rank of a shard. The gradient
        has the type of `logits`.

    Raises:
        OpsError: Shapes or types that do not agree.
    """
    if logits.dim() != 2 or not logits.shape[1]:
        raise OpsError(f"cross_entropy: logits have shape {list(logits.shape)}. Give [T, V], V at least 1.")
    _check_labels("cross_entropy", labels, len(logits))
    result: Tensor = chosen("cross_entropy")(logits, labels, shard)
    return result


def linear_cross_entropy(
    hidden_states: Tensor, weight: Tensor, labels: Tensor, *, shard: VocabularyShard = WHOLE
) -> Tensor:
    """`cross_entropy(hidden_states @ weight.T, labels)`, of which no backend but the reference keeps the logits.

    Args:
        hidden_states: `[T, H]`.
        weight: `[V, H]` of the output layer, or this rank's `[V/tp, H]` with `shard`.
        labels: As for `cross_entropy`.

    Returns:
        `[T]` float32. The gradient of `hidden_states` is this rank's part where the vocabulary is cut: sum it over the
        ranks, as for any layer that is cut by columns.
    """
    if hidden_states.dim() != 2 or weight.dim() != 2 or hidden_states.shape[1] != weight.shape[1]:
        raise OpsError(
            f"linear_cross_entropy: shapes {list(hidden_states.shape)}, {list(weight.shape)} do not agree. Give "
            "hidden_states [T, H] and weight [V, H]."
        )
    if hidden_states.dtype != weight.dtype:
        raise OpsError(
            f"linear_cross_entropy: hidden_states are {hidden_states.dtype}, weight is {weight.dtype}. Give one type; "
            "autocast does not convert them."
        )
    _check_labels("linear_cross_entropy", labels, len(hidden_states))
    result: Tensor = chosen("linear_cross_entropy")(hidden_states, weight, labels, shard)
    return result


def loss_of_known_labels(loss: Tensor, labels: Tensor, is_known: Tensor) -> Tensor:
    """`[T]`: the loss, 0 where the label is -100, NaN where it is not an id of the whole vocabulary."""
    return torch.where(labels == IGNORE_INDEX, 0.0, torch.where(is_known, loss, float("nan")))


def _check_labels(operator: str, labels: Tensor, num_tokens: int) -> None:
    if labels.shape != (num_tokens,) or labels.dtype != torch.int64:
        raise OpsError(
            f"{operator}: labels have shape {list(labels.shape)} and type {labels.dtype}, but there are {num_tokens} "
            "tokens. Give one int64 label for each token, -100 where there is no loss."
        )


@register("cross_entropy", "reference")
def cross_entropy_reference(logits: Tensor, labels: Tensor, shard: VocabularyShard = WHOLE) -> Tensor:
    """The formula as written."""
    wide = logits.to(compute_dtype(logits))
    top = shard.maximum(wide.detach().amax(dim=-1))
    column, here = local_target(labels, shard.start, logits.shape[1])
    target = torch.where(here, wide.gather(1, column[:, None])[:, 0] - top, 0.0)
    sums = torch.stack(((wide - top[:, None]).exp().sum(dim=-1), target, here.to(wide.dtype)))
    denominator, target, known = SumOverRanks.apply(sums, shard)
    return loss_of_known_labels(denominator.log() - target, labels, known > 0)


@register("linear_cross_entropy", "reference")
def linear_cross_entropy_reference(
    hidden_states: Tensor, weight: Tensor, labels: Tensor, shard: VocabularyShard = WHOLE
) -> Tensor:
    """The product, then the loss."""
    return cross_entropy_reference(hidden_states @ weight.T, labels, shard)


@case_of("cross_entropy")
def _case(inputs: Inputs) -> Case:
    labels = _case_labels(inputs)
    logits = inputs.normal(inputs.tokens, 4 * inputs.tokens)
    return Case(lambda x: cross_entropy(x, labels.to(x.device)), (logits,))


@case_of("linear_cross_entropy")
def _linear_case(inputs: Inputs) -> Case:
    labels = _case_labels(inputs)
    tensors = (inputs.normal(inputs.tokens, 64), inputs.normal(4 * inputs.tokens, 64))
    return Case(lambda h, w: linear_cross_entropy(h, w, labels.to(h.device)), tensors)


def _case_labels(inputs: Inputs) -> Tensor:
    labels = torch.randint(0, 4 * inputs.tokens, (inputs.tokens,), generator=inputs.generator)
    labels[::7] = IGNORE_INDEX
    return labels
