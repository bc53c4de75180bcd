# SPDX-License-Identifier: Apache-2.0
"""Compare a backend with the reference: one table of tolerances, forward and backward.

The reference is computed in float64 from the same rounded inputs, so that a tolerance speaks about the tested backend
alone.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..backend import use_backend
from ..config import BackendName

# largest difference allowed, relative to the largest value of the expected tensor
TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 5e-6,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}


def outputs_and_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """The output of `function` and its gradients for every floating input, for the output gradient `grad`."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    output = function(*leaves)
    learned = [x for x in leaves if x.requires_grad]
    gradients = torch.autograd.grad(output, learned, grad.to(output.dtype), allow_unused=True)
    return [
        output.detach(),
        *(torch.zeros_like(x) if g is None else g for x, g in zip(learned, gradients, strict=True)),
    ]


def assert_parity(function: Callable[..., Tensor], inputs: Sequence[Tensor], *, backend: BackendName = "torch") -> None:
    """`function`, written with our operators, agrees with the float64 reference in value and gradients on `backend`."""
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    with use_backend("reference"):
        shape = function(*wide).shape
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(inputs[0].dtype).to(inputs[0].device)
        expected = outputs_and_gradients(function, wide, grad.double())
    with use_backend(backend):
        actual = outputs_and_gradients(function, inputs, grad)
    for number, (left, right) in enumerate(zip(actual, expected, strict=True)):
        name = "output" if number == 0 else f"gradient {number - 1}"
        assert_close(left, right, dtype=inputs[0].dtype, name=name)


def assert_close(actual: Tensor, expected: Tensor, *, dtype: torch.dtype, name: str) -> None:
    """Largest difference within the tolerance of `dtype`, relative to the largest expected value (at least 1)."""
    assert actual.shape == expected.shape, f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    if not expected.numel():
        return
    scale = max(1.0, expected.abs().max().item())
    difference = (actual.double() - expected.double()).abs().max().item() / scale
    assert difference <= TOLERANCES[dtype], (
        f"{name}: difference {difference:.2e} over {TOLERANCES[dtype]:.0e} for {dtype}"
    )
