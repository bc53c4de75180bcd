# SPDX-License-Identifier: Apache-2.0
"""Token loss reference: by hand, and its gradients."""

import math

import pytest
import torch

from mindvl_ops import OpsError, cross_entropy, linear_cross_entropy, use_backend
from mindvl_ops.cross_entropy import IGNORE_INDEX, cross_entropy_reference, linear_cross_entropy_reference


def test_even_logits_cost_the_log_of_the_vocabulary_and_ignored_labels_nothing():
    loss = cross_entropy_reference(torch.zeros(2, 8), torch.tensor([3, -100]))
    torch.testing.assert_close(loss, torch.tensor([math.log(8), 0.0]))


def test_gradients_are_right_in_float64():
    logits = torch.randn(3, 4).double().requires_grad_()
    labels = torch.tensor([1, -100, 3])
    assert torch.autograd.gradcheck(lambda x: cross_entropy_reference(x, labels), (logits,))


def test_the_fused_loss_is_the_loss_of_the_product():
    hidden, weight = torch.eye(3), torch.tensor([[0.0, 0.0, 0.0], [math.log(3), 0.0, 0.0]])
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1, -100]))
    torch.testing.assert_close(loss, torch.tensor([math.log(4), math.log(2), 0.0]))


def test_gradients_of_the_fused_loss_are_right_in_float64():
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=generator).double().requires_grad_() for shape in ((3, 2), (4, 2))]
    labels = torch.tensor([1, -100, 3])
    for function in (linear_cross_entropy_reference, linear_cross_entropy):
        assert torch.autograd.gradcheck(lambda h, w, f=function: f(h, w, labels), inputs)


def test_widths_that_do_not_agree_are_refused():
    with pytest.raises(OpsError, match=r"\[3, 2\], \[4, 3\] do not agree"):
        linear_cross_entropy(torch.zeros(3, 2), torch.zeros(4, 3), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # the second takes the way in chunks
def test_a_label_outside_of_the_vocabulary_gives_nan_and_changes_no_other_token(backend, dtype):
    hidden, weight = torch.randn(6, 4).to(dtype), torch.randn(5, 4).to(dtype)
    good, bad = torch.tensor([0, 4, IGNORE_INDEX, 2, 1, 3]), torch.tensor([0, -1, IGNORE_INDEX, 5, -101, 8])
    with use_backend(backend):
        for loss in (
            lambda labels: linear_cross_entropy(hidden, weight, labels),
            lambda labels: cross_entropy(hidden @ weight.T, labels),
        ):
            expected, found = loss(good), loss(bad)
            assert found.isnan().tolist() == [False, True, False, True, True, True]
            assert found[0] == expected[0]
            assert found[2] == 0


def test_labels_of_another_shape_or_type_are_refused():
    for labels in (torch.zeros(2).long(), torch.zeros(3, 1).long(), torch.zeros(3)):
        with pytest.raises(OpsError, match="cross_entropy: labels have shape"):
            cross_entropy(torch.zeros(3, 5), labels)
        with pytest.raises(OpsError, match="linear_cross_entropy: labels have shape"):
            linear_cross_entropy(torch.zeros(3, 2), torch.zeros(5, 2), labels)
    with pytest.raises(OpsError, match=r"cross_entropy: logits have shape \[3\]"):
        cross_entropy(torch.zeros(3), torch.zeros(3).long())
    with pytest.raises(OpsError, match=r"cross_entropy: logits have shape \[3, 0\]"):
        cross_entropy(torch.zeros(3, 0), torch.zeros(3).long())
    with pytest.raises(OpsError, match=r"hidden_states are torch\.float32, weight is torch\.bfloat16"):
        linear_cross_entropy(torch.zeros(3, 2), torch.zeros(5, 2).bfloat16(), torch.zeros(3).long())
