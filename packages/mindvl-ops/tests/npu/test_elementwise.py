# SPDX-License-Identifier: Apache-2.0
"""Norms, rotary, SwiGLU and masked softmax on the simulated NPU: equal to the reference; what it would refuse."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindvl_ops import (
    OpsError,
    add_rms_norm,
    rms_norm,
    rotary,
    rotary_tables,
    scaled_masked_softmax,
    swiglu,
    use_backend,
)
from mindvl_ops.testing import assert_parity

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
shapes = st.lists(st.integers(0, 5), min_size=0, max_size=3)
on_simulator = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# A width of 1 is left out: the norm is then the sign of x, and its gradient is rounding error alone.
@on_simulator
@given(leading=shapes, width=st.integers(2, 20), dtype=dtypes)
def test_rms_norm_equals_reference(fake_npu, leading, width, dtype):
    x, weight = torch.randn(*leading, width).to(dtype), torch.randn(width).to(dtype)
    assert_parity(lambda x, weight: rms_norm(x, weight, 1e-6), (x, weight), backend="npu")


@on_simulator
@given(leading=shapes, width=st.integers(2, 20), dtype=dtypes)
def test_add_rms_norm_equals_reference(fake_npu, leading, width, dtype):
    x, residual = (torch.randn(*leading, width).to(dtype) for _ in range(2))
    assert_parity(
        lambda x, y, w: torch.cat(add_rms_norm(x, y, w, 1e-6)) if x.dim() else None,
        (x, residual, torch.randn(width).to(dtype)),
        backend="npu",
    )


@on_simulator
@given(
    tokens=st.integers(1, 9), heads=st.integers(1, 4), half=st.integers(1, 8), interleaved=st.booleans(), dtype=dtypes
)
def test_rotary_equals_reference(fake_npu, tokens, heads, half, interleaved, dtype):
    cos, sin = rotary_tables(torch.arange(tokens) * 37, 2 * half, 1e4, interleaved)
    x = torch.randn(tokens, heads, 2 * half).to(dtype)
    assert_parity(lambda x: rotary(x, cos, sin, interleaved), (x,), backend="npu")


@on_simulator
@given(leading=shapes, half=st.integers(1, 20), dtype=dtypes, transposed=st.booleans())
def test_swiglu_equals_reference(fake_npu, leading, half, dtype, transposed):
    x = torch.randn(*leading, 2 * half).to(dtype)
    if transposed and len(leading) > 1:
        x = x.transpose(0, 1)
    assert_parity(swiglu, (x,), backend="npu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_softmax_equals_reference(fake_npu, dtype):
    x = torch.randn(2, 3, 32, 64).to(dtype)
    blocked = torch.rand(2, 1, 32, 64) < 0.5
    blocked[0, 0, 3] = True  # a row without any place
    assert_parity(lambda x: scaled_masked_softmax(x, blocked, 0.3), (x,), backend="npu")


def test_a_float32_weight_beside_16_bit_input_is_allowed_and_float64_is_not(fake_npu):
    with use_backend("npu"):
        assert rms_norm(torch.randn(2, 4).bfloat16(), torch.ones(4), 1e-6).dtype == torch.bfloat16
        with pytest.raises(OpsError, match=r"x torch.float64 with weight torch.float64"):
            rms_norm(torch.zeros(2, 4).double(), torch.ones(4).double(), 1e-6)


def test_the_rotary_kernel_gets_float32_and_no_gradient_for_the_tables(fake_npu):
    x = torch.randn(3, 2, 4).bfloat16().requires_grad_()
    with use_backend("npu"):
        rotary(x, *rotary_tables(torch.arange(3), 4, 1e4)).sum().backward()
    (call,) = [call for call in fake_npu.calls if call.op.startswith("npu_rotary_mul") and "r1" in call.arguments][:1]
    assert call.arguments["input"].dtype == "float32"
    assert call.arguments["r1"].shape == (3, 1, 4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_keeps_no_heads_for_its_backward_pass(fake_npu, interleaved):
    cos, sin = rotary_tables(torch.arange(3), 4, 1e4, interleaved)
    x, kept = torch.randn(3, 2, 4).bfloat16().requires_grad_(), []
    with use_backend("npu"), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rotary(x, cos, sin, interleaved)
    assert {tensor.data_ptr() for tensor in kept} == {cos.data_ptr(), sin.data_ptr()}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rotary(torch.zeros(2, 1000, 4), torch.ones(2, 4), torch.zeros(2, 4)), "1000 heads of 4"),
        (lambda: rotary(torch.zeros(2, 1, 896), torch.ones(2, 896), torch.zeros(2, 896)), "1 heads of 896"),
        (lambda: scaled_masked_softmax(torch.zeros(1, 1, 32, 33), torch.zeros(1, 1, 32, 33).bool()), "32 x 33"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_before_the_call(fake_npu, call, message):
    with use_backend("npu"), pytest.raises(OpsError, match=message):
        call()
    assert not fake_npu.calls
