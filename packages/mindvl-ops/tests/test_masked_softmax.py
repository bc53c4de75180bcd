# SPDX-License-Identifier: Apache-2.0
"""Scaled masked softmax: by hand, fully masked rows, gradients, refusals."""

import pytest
import torch

from mindvl_ops import OpsError, scaled_masked_softmax, use_backend
from mindvl_ops.masked_softmax import scaled_masked_softmax_reference


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_masked_places_get_nothing_and_a_masked_row_is_uniform(backend):
    x = torch.tensor([[[[0.0, 2.0, 5.0], [1.0, 2.0, 3.0]]]])
    blocked = torch.tensor([[[[False, False, True], [True, True, True]]]])
    with use_backend(backend):
        result = scaled_masked_softmax(x, blocked, 0.5)
    e = torch.tensor(1.0).exp().item()
    torch.testing.assert_close(result[0, 0], torch.tensor([[1 / (1 + e), e / (1 + e), 0.0], [1 / 3, 1 / 3, 1 / 3]]))


def test_gradients_are_right_in_float64():
    x = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    blocked = torch.zeros(1, 1, 3, 4, dtype=torch.bool)
    blocked[..., 2:] = True
    for function in (scaled_masked_softmax_reference, scaled_masked_softmax):
        assert torch.autograd.gradcheck(lambda x, f=function: f(x, blocked, 0.7), (x,))


def test_a_mask_that_does_not_fit_is_refused():
    x = torch.zeros(2, 3, 4, 5)
    with pytest.raises(OpsError, match=r"mask \[2, 2, 4, 5\] does not fit"):
        scaled_masked_softmax(x, torch.zeros(2, 2, 4, 5, dtype=torch.bool))
    with pytest.raises(OpsError, match=r"mask has type torch.float32"):
        scaled_masked_softmax(x, torch.zeros(1, 1, 4, 5))
