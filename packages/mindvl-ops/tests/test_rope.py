# SPDX-License-Identifier: Apache-2.0
"""Rotary reference: a quarter turn by hand, and its gradients."""

import pytest
import torch

from mindvl_ops.rope import rotary_reference


@pytest.mark.parametrize(("interleaved", "expected"), [(False, [-3.0, -4.0, 1.0, 2.0]), (True, [-2.0, 1.0, -4.0, 3.0])])
def test_a_quarter_turn_moves_each_pair(interleaved, expected):
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    turned = rotary_reference(x, torch.zeros(1, 4), torch.ones(1, 4), interleaved)
    assert turned[0, 0].tolist() == expected


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_are_right_in_float64(interleaved):
    x = torch.randn(2, 2, 4).double().requires_grad_()
    cos, sin = torch.randn(2, 4).double(), torch.randn(2, 4).double()
    assert torch.autograd.gradcheck(lambda x: rotary_reference(x, cos, sin, interleaved), (x,))
