# SPDX-License-Identifier: Apache-2.0
"""RMSNorm reference: by hand, and its gradients."""

import torch

from mindvl_ops.norm import rms_norm_reference


def test_three_and_four_are_divided_by_their_root_mean_square():
    result = rms_norm_reference(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(result, torch.tensor([3.0, 8.0]) / 12.5**0.5)


def test_gradients_are_right_in_float64():
    x, weight = torch.randn(3, 4).double().requires_grad_(), torch.randn(4).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: rms_norm_reference(x, w, 1e-5), (x, weight))
