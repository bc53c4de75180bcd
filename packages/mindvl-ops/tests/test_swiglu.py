# SPDX-License-Identifier: Apache-2.0
"""SwiGLU reference: by hand, its gradients, and its refusal."""

import pytest
import torch

from mindvl_ops import OpsError, swiglu
from mindvl_ops.swiglu import swiglu_reference


def test_the_first_half_is_the_gate():
    assert swiglu_reference(torch.tensor([0.0, 100.0, 5.0, 2.0])).tolist() == [0.0, 200.0]


def test_gradients_are_right_in_float64():
    assert torch.autograd.gradcheck(swiglu_reference, (torch.randn(3, 4).double().requires_grad_(),))


def test_an_odd_width_is_refused():
    with pytest.raises(OpsError, match=r"last axis of \[.*3\] is not even"):
        swiglu(torch.zeros(2, 3))
