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


@pytest.mark.parametrize("backend", ["reference", "torch", "npu"])
@pytest.mark.parametrize("on_device", [False, True])
def test_padding_rows_have_zeros_for_results_and_gradients_whatever_they_hold(fake_npu, backend, on_device):
    """Of the other rows, everything is bitwise what it is without padding."""
    generator = torch.Generator().manual_seed(0)
    rows, given = torch.randn(5, 4, generator=generator), torch.randn(8, 6, generator=generator)
    weight = torch.randn(3, 4, 6, generator=generator)
    alone, padded = (x.requires_grad_() for x in (rows.clone(), torch.cat((rows, torch.full((3, 4), torch.nan)))))
    first, second = (weight.clone().requires_grad_() for _ in range(2))
    sizes = [[2, 0, 3], [2, 0, 3, 3]]
    with use_backend(backend):
        expected, found = (
            grouped_matmul(x, w, torch.tensor(size) if on_device else size)
            for x, w, size in zip((alone, padded), (first, second), sizes, strict=True)
        )
    given[5:] = torch.nan
    expected.backward(given[:5])
    found.backward(given)
    assert torch.equal(found[:5], expected)
    assert torch.equal(second.grad, first.grad)
    assert torch.equal(padded.grad[:5], alone.grad)
    assert not found[5:].any()
    assert not padded.grad[5:].any()


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


@pytest.mark.parametrize("sizes", [[2, 0, 3], [2, 0, 1, 2]])
def test_gradients_are_right_in_float64(sizes):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, generator=generator).double().requires_grad_()
    weight = torch.randn(3, 3, 2, generator=generator).double().requires_grad_()
    for function in (grouped_matmul_reference, grouped_matmul):
        assert torch.autograd.gradcheck(lambda x, w, f=function: f(x, w, sizes), (x, weight))


def test_sizes_that_do_not_fit_are_refused():
    x, weight = torch.zeros(3, 2), torch.zeros(2, 2, 4)
    with pytest.raises(OpsError, match=r"sizes \[1, 1\] do not add up to 3"):
        grouped_matmul(x, weight, [1, 1])
    with pytest.raises(OpsError, match=r"sizes \[4, -1\] do not add up to 3"):
        grouped_matmul(x, weight, torch.tensor([4, -1]))
    with pytest.raises(OpsError, match="1 sizes do not agree"):
        grouped_matmul(x, weight, [3])
    with pytest.raises(OpsError, match="4 sizes do not agree"):
        grouped_matmul(x, weight, [3, 0, 0, 0])
    with pytest.raises(OpsError, match="Give one type"):
        grouped_matmul(x, weight.bfloat16(), [1, 2])
