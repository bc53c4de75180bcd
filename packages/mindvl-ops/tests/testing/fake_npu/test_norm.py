# SPDX-License-Identifier: Apache-2.0
"""RMSNorm family: rounding points, statistics, gradients, refusals."""

import pytest
import torch

from mindvl_ops.testing.fake_npu import RefusedError

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def _random(seed, *shape, dtype=F32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _formula(x, gamma, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gamma


@pytest.mark.parametrize(("dtype", "gamma_dtype"), [(BF16, BF16), (BF16, F32), (F16, F16), (F16, F32), (F32, F32)])
def test_rms_norm_rounds_once(fake_npu, dtype, gamma_dtype):
    x, gamma = _random(0, 3, 4, 8, dtype=dtype), _random(1, 8, dtype=gamma_dtype)
    y, rstd = fake_npu.torch_npu.npu_rms_norm(x, gamma)
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.double(), _formula(x.double(), gamma.double()).to(dtype).double(), rtol=1e-6, atol=2e-6
    )
    assert rstd.dtype == F32
    assert rstd.shape == (3, 4, 1)


def test_normalised_axes_of_rstd_stay_as_ones(fake_npu):
    assert fake_npu.torch_npu.npu_rms_norm(_random(0, 2, 3, 4), _random(1, 3, 4))[1].shape == (2, 1, 1)


def test_gradients_of_rms_norm_are_those_of_the_formula_and_of_the_backward_operator(fake_npu):
    x, gamma, dy = _random(0, 5, 8).requires_grad_(), _random(1, 8).requires_grad_(), _random(2, 5, 8)
    y, rstd = fake_npu.torch_npu.npu_rms_norm(x, gamma)
    wide = [leaf.detach().double().requires_grad_() for leaf in (x, gamma)]
    expected = torch.autograd.grad(_formula(*wide), wide, dy.double())
    through_node = torch.autograd.grad(y, (x, gamma), dy)
    by_operator = fake_npu.torch_npu.npu_rms_norm_backward(dy, x.detach(), gamma.detach(), rstd)
    for wanted, one, two in zip(expected, through_node, by_operator, strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(two.double(), wanted, rtol=1e-4, atol=1e-5)
    assert not rstd.requires_grad


def test_the_gradient_of_gamma_is_float32_in_the_operator_and_cast_by_autograd(fake_npu):
    x, gamma = _random(0, 5, 8, dtype=BF16).requires_grad_(), _random(1, 8, dtype=BF16).requires_grad_()
    y, rstd = fake_npu.torch_npu.npu_rms_norm(x, gamma)
    y.sum().backward()
    dgamma = fake_npu.torch_npu.npu_rms_norm_backward(torch.ones_like(y), x.detach(), gamma.detach(), rstd)[1]
    assert dgamma.dtype == F32
    assert gamma.grad.dtype == BF16
    torch.testing.assert_close(gamma.grad, dgamma.to(BF16))


def test_add_rms_norm_returns_y_rstd_and_the_sum_and_rounds_twice_in_bf16(fake_npu):
    x1, x2, gamma = _random(0, 64, 32, dtype=BF16), _random(1, 64, 32, dtype=BF16), _random(2, 32, dtype=BF16)
    y, _, total = fake_npu.torch_npu.npu_add_rms_norm(x1, x2, gamma)
    assert torch.equal(total, x1 + x2)
    exact = x1.double() + x2.double()
    normed = (exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt()).float().to(BF16)
    torch.testing.assert_close(y, normed * gamma, rtol=1e-2, atol=0)
    assert (y == normed * gamma).float().mean() > 0.999  # equal but for ties of the first rounding
    once = fake_npu.torch_npu.npu_rms_norm(x1 + x2, gamma)[0]
    assert not torch.equal(y, once)


def test_add_rms_norm_adds_in_half_precision_for_float16(fake_npu):
    x1, x2 = torch.full((2, 4), 2048.0, dtype=F16), torch.full((2, 4), 1.0, dtype=F16)  # 2049 is no float16
    _, rstd, total = fake_npu.torch_npu.npu_add_rms_norm(x1, x2, torch.ones(4, dtype=F16), 0.0)
    assert torch.equal(total, torch.full((2, 4), 2048.0, dtype=F16))
    torch.testing.assert_close(rstd, torch.full((2, 1), 1 / 2048))


RULES = [
    ("npu_rms_norm", (_random(0, 2, 8), _random(1, 4)), r"gamma \[4\] is not the end of the shape of input \[2, 8\]"),
    ("npu_rms_norm", (_random(0, 2, 8), _random(1, 8, dtype=BF16)), "no supported pair of types"),
    ("npu_rms_norm", (_random(0, 2, 8, dtype=F16), _random(1, 8, dtype=BF16)), "no supported pair of types"),
    ("npu_rms_norm", (_random(0, 2, 8).double(), _random(1, 8).double()), "no supported pair of types"),
    ("npu_rms_norm", (_random(0, *[1] * 9), _random(1, 1)), "input has rank 9, supported is 2 to 8"),
    ("npu_rms_norm", (_random(0, 8), _random(1, 8)), "input has rank 1, supported is 2 to 8"),
    ("npu_rms_norm_backward", (_random(0, 3, 8), _random(0, 2, 8), _random(1, 8), _random(2, 2, 1)), "another shape"),
    (
        "npu_rms_norm_backward",
        (_random(0, 2, 8), _random(0, 2, 8), _random(1, 8), _random(2, 2)),
        "rstd must be float32",
    ),
    ("npu_add_rms_norm", (_random(0, 2, 8), _random(0, 2, 8, dtype=BF16), _random(1, 8)), "must have one type"),
    ("npu_add_rms_norm", (_random(0, 2, 8), _random(0, 1, 8), _random(1, 8)), "differ in shape"),
    ("npu_add_rms_norm", (_random(0, 2, 8), _random(0, 2, 8), _random(1, 4)), "is not the end of the shape"),
]


@pytest.mark.parametrize(("op", "arguments", "words"), RULES)
def test_a_broken_rule_is_named(fake_npu, op, arguments, words):
    with pytest.raises(RefusedError, match=words):
        getattr(fake_npu.torch_npu, op)(*arguments)


def test_rank_one_passes_when_the_documented_limit_is_off(fake_npu):
    with fake_npu.relaxed(documented_limits=False):
        assert fake_npu.torch_npu.npu_rms_norm(_random(0, 8), _random(1, 8))[1].shape == (1,)
