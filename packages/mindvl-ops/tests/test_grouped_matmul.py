# SPDX-License-Identifier: Apache-2.0
"""Grouped matmul: one group after the other, empty groups, gradients, refusals."""

import pytest
import torch

from mindvl_ops import OpsError, grouped_matmul, use_backend
from mindvl_ops.grouped_matmul import grouped_matmul_reference


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("on_device", [False, True])
def test_each_group_meets_its_own_matrix(backend, on_device):
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    weight = torch.stack([torch.eye(2), torch.full((2, 2), 9.0), 2 * torch.eye(2)])
    sizes = torch.tensor([1, 0, 2]) if on_device else [1, 0, 2]
    with use_backend(backend):
        assert grouped_matmul(x, weight, sizes).tolist() == [[1.0, 0.0], [0.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_an_empty_group_has_a_gradient_of_zeros(backend):
    x, weight = torch.ones(3, 2), torch.ones(3, 2, 4, requires_grad=True)
    with use_backend(backend):
        grouped_matmul(x, weight, [2, 0, 1]).sum().backward()
    assert weight.grad[:, 0, 0].tolist() == [2.0, 0.0, 1.0]


@pytest.mark.parametrize("learns", [False, True])
def test_rows_are_kept_for_backward_only_if_the_weight_learns(learns):
    x, weight, kept = torch.ones(3, 2, requires_grad=True), torch.ones(2, 2, 4, requires_grad=learns), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        product = grouped_matmul(x.square(), weight, [1, 2])
    assert [list(tensor.shape) for tensor in kept if tensor.dim() == 2] == [[3, 2]] * (
        1 + learns
    )  # and that of the square
    product.sum().backward()
    assert x.grad.tolist() == [[8.0, 8.0]] * 3


def test_gradients_are_right_in_float64():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, generator=generator).double().requires_grad_()
    weight = torch.randn(3, 3, 2, generator=generator).double().requires_grad_()
    for function in (grouped_matmul_reference, grouped_matmul):
        assert torch.autograd.gradcheck(lambda x, w, f=function: f(x, w, [2, 0, 3]), (x, weight))


def test_sizes_that_do_not_fit_are_refused():
    x, weight = torch.zeros(3, 2), torch.zeros(2, 2, 4)
    with pytest.raises(OpsError, match=r"sizes \[1, 1\] do not add up to 3"):
        grouped_matmul(x, weight, [1, 1])
    with pytest.raises(OpsError, match=r"sizes \[4, -1\] do not add up to 3"):
        grouped_matmul(x, weight, torch.tensor([4, -1]))
    with pytest.raises(OpsError, match="1 sizes do not agree"):
        grouped_matmul(x, weight, [3])
    with pytest.raises(OpsError, match="Give one type"):
        grouped_matmul(x, weight.bfloat16(), [1, 2])
