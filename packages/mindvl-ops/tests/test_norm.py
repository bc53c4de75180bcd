# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone and after a sum: by hand, and its gradients."""

import pytest
import torch

from mindvl_ops import OpsError, add_rms_norm, rms_norm, use_backend
from mindvl_ops.norm import add_rms_norm_reference, rms_norm_reference


def test_three_and_four_are_divided_by_their_root_mean_square():
    result = rms_norm_reference(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(result, torch.tensor([3.0, 8.0]) / 12.5**0.5)


def test_gradients_are_right_in_float64():
    x, weight = torch.randn(3, 4).double().requires_grad_(), torch.randn(4).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: rms_norm_reference(x, w, 1e-5), (x, weight))


def test_the_sum_is_rounded_before_it_is_normed():
    x, residual = torch.tensor([[256.0, 1.0]]).bfloat16(), torch.tensor([[1.0, 1.0]]).bfloat16()
    normed, total = add_rms_norm(x, residual, torch.ones(2).bfloat16(), 0.0)
    assert total.tolist() == [[256.0, 2.0]]  # 257 has no 16-bit form
    assert torch.equal(normed, rms_norm_reference(total, torch.ones(2).bfloat16(), 0.0))


def test_gradients_of_the_sum_and_of_its_norm_meet():
    x, residual, weight = (torch.randn(*shape).double().requires_grad_() for shape in ((3, 4), (3, 4), (4,)))
    assert torch.autograd.gradcheck(lambda *inputs: add_rms_norm_reference(*inputs, 1e-5), (x, residual, weight))


def test_a_residual_of_another_type_is_refused():
    with pytest.raises(OpsError, match="cannot be added"):
        add_rms_norm(torch.zeros(2, 4), torch.zeros(2, 4).bfloat16(), torch.zeros(4), 1e-6)


@pytest.mark.parametrize("weight", [torch.ones(1), torch.ones(3), torch.ones(1, 4), torch.ones(())])
def test_a_weight_of_another_shape_is_refused_and_never_broadcast(weight):
    x = torch.randn(2, 4)
    with pytest.raises(OpsError, match=r"weight has shape .*Give x \[\.\.\., H\] and weight \[H\]"):
        rms_norm(x, weight, 1e-6)
    with pytest.raises(OpsError, match="weight has shape"):
        add_rms_norm(x, x, weight, 1e-6)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_second_derivatives_are_right(backend):
    """A penalty on gradients, as in regularisers: the scale of the norm depends on x as well."""
    x, weight = torch.randn(2, 3).double().requires_grad_(), torch.randn(3).double().requires_grad_()
    with use_backend(backend):
        assert torch.autograd.gradgradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))
        assert torch.autograd.gradgradcheck(lambda x, w: add_rms_norm(x, x, w, 1e-5), (x, weight))
