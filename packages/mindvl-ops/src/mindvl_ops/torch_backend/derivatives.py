# SPDX-License-Identifier: Apache-2.0
"""Second derivatives of the operators that write their own backward pass, taken from the reference.

A backward pass of our own may reuse what its forward pass kept (the scale of a norm, the log-sum-exp of a loss). Those
are constants to autograd, so a second derivative through them would be silently wrong. With `create_graph=True` the
backward functions of this directory therefore return the gradients of the reference, which is differentiable to any
order; an ordinary backward pass does not come here. Kernels that have no second derivative, and of which PyTorch would
silently leave it out, refuse it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import OpsError


def is_differentiated_again() -> bool:
    """Whether the backward pass that runs now was asked for with `create_graph=True`."""
    return torch.is_grad_enabled()


def gradients_of_reference(
    reference: Callable[..., Tensor], inputs: Sequence[Any], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of `reference(*inputs)`, one for each input, that can be differentiated again.

    Args:
        inputs: Saved tensors and constants; the gradient of what requires none is None.
        grad: Gradient of the output.
    """
    # An alias of each tensor, so that a tensor that is given twice gets the gradient of each place alone.
    aliases = [x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in inputs]
    learned = [x for x in aliases if isinstance(x, Tensor) and x.requires_grad]
    found = iter(torch.autograd.grad(reference(*aliases), learned, grad, create_graph=True, allow_unused=True))
    return tuple(next(found) if isinstance(x, Tensor) and x.requires_grad else None for x in aliases)


def without_second_derivative(output: Tensor, operator: str) -> Tensor:
    """The same tensor, whose backward pass raises an OpsError if it is asked for with `create_graph=True`."""

    def refuse(grad: Tensor) -> None:
        if is_differentiated_again():
            raise OpsError(
                f"{operator}: its kernel has no second derivative (create_graph=True). Choose backend reference for "
                f"this operator: ops.overrides={{{operator.split()[-1]}: reference}}."
            )

    if output.requires_grad:
        output.register_hook(refuse)
    return output
