# SPDX-License-Identifier: Apache-2.0
"""Token loss reference: by hand, and its gradients."""

import math

import torch

from mindvl_ops.cross_entropy import cross_entropy_reference


def test_even_logits_cost_the_log_of_the_vocabulary_and_ignored_labels_nothing():
    loss = cross_entropy_reference(torch.zeros(2, 8), torch.tensor([3, -100]))
    torch.testing.assert_close(loss, torch.tensor([math.log(8), 0.0]))


def test_gradients_are_right_in_float64():
    logits = torch.randn(3, 4).double().requires_grad_()
    labels = torch.tensor([1, -100, 3])
    assert torch.autograd.gradcheck(lambda x: cross_entropy_reference(x, labels), (logits,))
