# SPDX-License-Identifier: Apache-2.0
"""npu_cross_entropy_loss: shapes, types, values, gradient, refusals."""

import math

import pytest
import torch

from mindvl_ops.testing.fake_npu import RefusedError


def _random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TARGET = torch.tensor([1, 0, 4])


def _losses(logits):
    return [
        math.log(sum(math.exp(v) for v in row)) - row[label]
        for row, label in zip(logits.tolist(), TARGET.tolist(), strict=True)
    ]


def test_the_loss_has_one_entry_and_the_log_probabilities_have_no_gradient(fake_npu):
    logits = _random(0, 3, 5).requires_grad_()
    loss, log_prob, zloss, lse = fake_npu.torch_npu.npu_cross_entropy_loss(logits, TARGET)
    assert [tuple(x.shape) for x in (loss, log_prob, zloss, lse)] == [(1,), (3, 5), (1,), (3,)]
    torch.testing.assert_close(loss, torch.tensor([sum(_losses(logits)) / 3]))
    torch.testing.assert_close(log_prob.exp().sum(-1), torch.ones(3))
    assert loss.requires_grad
    assert not log_prob.requires_grad
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    one_hot = torch.zeros(3, 5)
    one_hot[range(3), TARGET] = 1.0
    torch.testing.assert_close(grad, (log_prob.exp() - one_hot) / 3)


@pytest.mark.parametrize(("reduction", "shape"), [("sum", (1,)), ("none", (3,))])
def test_reductions(fake_npu, reduction, shape):
    logits = _random(0, 3, 5)
    loss = fake_npu.torch_npu.npu_cross_entropy_loss(logits, TARGET, None, reduction)[0]
    losses = torch.tensor(_losses(logits))
    assert loss.shape == shape
    torch.testing.assert_close(loss, losses if reduction == "none" else losses.sum().reshape(1))


def test_the_loss_of_bf16_logits_is_bf16(fake_npu):
    loss = fake_npu.torch_npu.npu_cross_entropy_loss(_random(0, 3, 5).bfloat16(), TARGET)[0]
    assert loss.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": torch.zeros(3)}, r"input has rank 1, must be \[N, C\]"),
        ({"input": torch.zeros(3, 5).double()}, "input is torch.float64"),
        ({"input": torch.zeros(0, 5)}, "N = 0 is outside 1 to 200000"),
        ({"target": TARGET.int()}, "target is torch.int32, must be int64"),
        ({"target": TARGET[:2]}, r"target \[2\] must be \[3\]"),
        ({"target": torch.tensor([1, 0, 5])}, "a target lies outside 0 to 4"),
        ({"target": torch.tensor([1, 0, -100])}, "an ignore_index below 0 ignores none"),
        ({"weight": torch.ones(4)}, r"weight must be float32 \[5\]"),
        ({"reduction": "max"}, "reduction 'max'"),
        ({"ignore_index": 5}, "ignore_index 5 must be below C = 5"),
        ({"label_smoothing": 1.0}, r"label_smoothing 1.0 is outside \[0, 1\)"),
        ({"return_zloss": True}, "z-loss is reserved"),
        ({"lse_square_scale_for_zloss": 0.1}, "z-loss is reserved"),
        ({"input": torch.zeros(3, 5, requires_grad=True), "weight": torch.ones(5)}, "takes no other argument"),
        ({"input": torch.zeros(3, 5, requires_grad=True), "ignore_index": 2}, "takes no other argument"),
        (
            {"input": torch.zeros(3, 5, requires_grad=True), "reduction": "sum", "label_smoothing": 0.1},
            "takes no other argument",
        ),
    ],
)
def test_a_broken_rule_is_named(fake_npu, change, words):
    with pytest.raises(RefusedError, match=words):
        fake_npu.torch_npu.npu_cross_entropy_loss(**{"input": torch.zeros(3, 5), "target": TARGET, **change})


def test_an_ignored_label_leaves_the_mean_when_the_documented_limit_is_off(fake_npu):
    logits = _random(0, 3, 5)
    with fake_npu.relaxed(documented_limits=False):
        loss = fake_npu.torch_npu.npu_cross_entropy_loss(logits, torch.tensor([1, 0, -100]))[0]
    torch.testing.assert_close(loss, torch.tensor([sum(_losses(logits)[:2]) / 2]))
