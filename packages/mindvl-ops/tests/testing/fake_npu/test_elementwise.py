# SPDX-License-Identifier: Apache-2.0
"""SwiGLU, scaled masked softmax and GELU: values in float64, gradients, refusals."""

import math

import pytest
import torch

from mindvl_ops.testing.fake_npu import RefusedError

BF16 = torch.bfloat16


def _random(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("shape", "dim"), [((3, 8), -1), ((4, 6), 0), ((2, 4, 3), 1)])
def test_swiglu_takes_the_gate_first(fake_npu, shape, dim):
    x = _random(0, *shape)
    half = shape[dim] // 2
    gate, up = x.double().narrow(dim, 0, half), x.double().narrow(dim, half, half)
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(fake_npu.torch_npu.npu_swiglu(x, dim).double(), expected, rtol=1e-5, atol=1e-6)


def test_swiglu_rounds_once(fake_npu):
    x = _random(0, 64, 32, dtype=BF16)
    npu = fake_npu.torch_npu
    assert torch.equal(npu.npu_swiglu(x), npu.npu_swiglu(x.float()).to(BF16))
    gate, up = x.chunk(2, -1)
    assert not torch.equal(npu.npu_swiglu(x), torch.nn.functional.silu(gate) * up)


def test_gradients_of_swiglu_agree_between_node_and_operator(fake_npu):
    x, dy = _random(0, 3, 8).requires_grad_(), _random(1, 3, 4)
    wide = x.detach().double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    (expected,) = torch.autograd.grad(gate * gate.sigmoid() * up, wide, dy.double())
    (one,) = torch.autograd.grad(fake_npu.torch_npu.npu_swiglu(x), x, dy)
    two = fake_npu.torch_npu.npu_swiglu_backward(dy, x.detach())
    torch.testing.assert_close(one.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(two.double(), expected, rtol=1e-5, atol=1e-6)


def _softmax_slowly(x, mask, scale):
    """Row by row."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    mask = mask.expand(x.shape)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in x.shape[:-1])):
        b, n, i = index.tolist()
        row = [-10000.0 if masked else float(v) * scale for v, masked in zip(x[b, n, i], mask[b, n, i], strict=True)]
        weights = [math.exp(value - max(row)) for value in row]
        out[b, n, i] = torch.tensor([weight / sum(weights) for weight in weights], dtype=torch.float64)
    return out


def test_scaled_masked_softmax_makes_a_fully_masked_row_uniform(fake_npu):
    x = _random(0, 1, 2, 32, 32)
    mask = _random(1, 1, 1, 32, 32) > 0
    mask[..., 3, :] = True
    y = fake_npu.torch_npu.npu_scaled_masked_softmax(x, mask, 0.5)
    torch.testing.assert_close(y.double(), _softmax_slowly(x, mask, 0.5), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y[0, :, 3], torch.full((2, 32), 1 / 32))


def test_gradients_of_the_softmax_agree_between_node_and_operator(fake_npu):
    x, dy = _random(0, 1, 2, 32, 32).requires_grad_(), _random(1, 1, 2, 32, 32)
    mask = (_random(2, 1, 1, 32, 32) > 0) & ~torch.eye(32, dtype=torch.bool)
    npu = fake_npu.torch_npu
    y = npu.npu_scaled_masked_softmax(x, mask, 0.5)
    (one,) = torch.autograd.grad(y, x, dy)
    expected_y = (x * 0.5).masked_fill(mask, float("-inf")).softmax(-1)
    (expected,) = torch.autograd.grad(expected_y, x, dy)
    two = npu.npu_scaled_masked_softmax_backward(dy, y.detach(), mask, 0.5, False)
    torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(two, expected, rtol=1e-4, atol=1e-6)


def test_the_reserved_triangle_is_computed_when_its_flag_is_off(fake_npu):
    x, mask = _random(0, 1, 1, 32, 32), torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    with fake_npu.relaxed(reserved_arguments=False):
        y = fake_npu.torch_npu.npu_scaled_masked_softmax(x, mask, 1.0, True)
        grad = fake_npu.torch_npu.npu_scaled_masked_softmax_backward(x, y, mask, 1.0, True)
    torch.testing.assert_close(y, fake_npu.torch_npu.npu_scaled_masked_softmax(x, mask.logical_not().triu(1), 1.0))
    assert not grad.triu(1).any()


X, M = torch.zeros(2, 3, 32, 64), torch.zeros(2, 1, 32, 64, dtype=torch.bool)
RULES = [
    ("npu_swiglu", (torch.zeros(3, 7),), "size 7 of axis -1 is odd"),
    ("npu_swiglu", (torch.zeros(8, 4).T,), "input is not contiguous"),
    ("npu_swiglu", (torch.zeros(0, 4),), r"input \[0, 4\] is empty"),
    ("npu_swiglu", (torch.zeros(3, 4).double(),), "input is torch.float64"),
    ("npu_swiglu", (torch.zeros(3, 4), 2), "dim 2 is no axis"),
    ("npu_swiglu", (torch.zeros([2] * 9),), "input has rank 9"),
    ("npu_swiglu_backward", (torch.zeros(3, 3), torch.zeros(3, 4)), "must be contiguous, half of"),
    ("npu_scaled_masked_softmax", (X[0], M), "x has rank 3"),
    ("npu_scaled_masked_softmax", (X.double(), M), "x is torch.float64"),
    ("npu_scaled_masked_softmax", (X, M.float()), "mask is torch.float32, must be bool"),
    ("npu_scaled_masked_softmax", (X, M[..., :32]), "mask .* does not fit x"),
    ("npu_scaled_masked_softmax", (X, M, 1.0, True), "fixed_triu_mask is reserved"),
    ("npu_scaled_masked_softmax", (X[..., :33], M[..., :33]), "sizes 32 x 33 must be multiples of 32"),
    (
        "npu_scaled_masked_softmax",
        (torch.zeros(1, 1, 32, 4128), torch.zeros(1, 1, 32, 4128, dtype=torch.bool)),
        "4128 is outside 1 to 4096",
    ),
    ("npu_gelu", (torch.zeros(2).double(),), "input is torch.float64"),
    ("fast_gelu", (torch.zeros(2).double(),), "input is torch.float64"),
]


@pytest.mark.parametrize(("op", "arguments", "words"), RULES)
def test_a_broken_rule_is_named(fake_npu, op, arguments, words):
    with pytest.raises(RefusedError, match=words):
        getattr(fake_npu.torch_npu, op)(*arguments)


def test_gelu_knows_two_forms(fake_npu):
    with pytest.raises(RefusedError, match="approximate 'exact'"):
        fake_npu.torch_npu.npu_gelu(torch.zeros(2), approximate="exact")


def test_the_gelus_follow_their_formulas(fake_npu):
    x, npu = _random(0, 4, 6), fake_npu.torch_npu
    exact = torch.tensor([[v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in row] for row in x.tolist()])
    torch.testing.assert_close(npu.npu_gelu(x), exact)
    fast = torch.tensor([[v / (1 + math.exp(-1.702 * v)) for v in row] for row in x.tolist()])
    torch.testing.assert_close(npu.fast_gelu(x), fast)
    torch.testing.assert_close(npu.npu_gelu_mul(x), exact[:, :3] * x[:, 3:])
