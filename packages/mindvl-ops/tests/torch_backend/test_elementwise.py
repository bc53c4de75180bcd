# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, rotary and SwiGLU of the torch backend equal the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_ops import add_rms_norm, rms_norm, rotary, rotary_tables, scaled_masked_softmax, swiglu
from mindvl_ops.testing import assert_parity

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@settings(max_examples=30, deadline=None)
# A width of 1 is left out: the norm is then the sign of x, and its gradient is rounding error alone.
@given(leading=st.lists(st.integers(0, 5), min_size=1, max_size=3), width=st.integers(2, 20), dtype=dtypes)
def test_rms_norm_equals_reference(leading, width, dtype):
    x = torch.randn(*leading, width).to(dtype)
    assert_parity(lambda x, weight: rms_norm(x, weight, 1e-6), (x, torch.randn(width).to(dtype)))


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 9), heads=st.integers(1, 4), half=st.integers(1, 8), interleaved=st.booleans(), dtype=dtypes
)
def test_rotary_equals_reference(tokens, heads, half, interleaved, dtype):
    cos, sin = torch.randn(tokens, 2 * half).double(), torch.randn(tokens, 2 * half).double()
    x = torch.randn(tokens, heads, 2 * half).to(dtype)
    assert_parity(lambda x: rotary(x, cos, sin, interleaved), (x,))


@settings(max_examples=30, deadline=None)
@given(leading=st.lists(st.integers(0, 5), min_size=1, max_size=3), half=st.integers(1, 20), dtype=dtypes)
def test_swiglu_equals_reference(leading, half, dtype):
    assert_parity(swiglu, (torch.randn(*leading, 2 * half).to(dtype),))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_keeps_the_length_of_every_pair(interleaved):
    angle = torch.rand(6, 4)
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    x = torch.randn(6, 3, 8)
    turned = rotary(x, angle.cos(), angle.sin(), interleaved)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


@settings(max_examples=30, deadline=None)
@given(leading=st.lists(st.integers(0, 5), min_size=1, max_size=3), width=st.integers(2, 20), dtype=dtypes)
def test_add_rms_norm_equals_reference(leading, width, dtype):
    x, residual = (torch.randn(*leading, width).to(dtype) for _ in range(2))
    weight = torch.randn(width).to(dtype)
    assert_parity(lambda x, y, w: torch.cat(add_rms_norm(x, y, w, 1e-6)), (x, residual, weight))


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 3), heads=st.integers(1, 3), sides=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    shared=st.sampled_from([(True, True), (False, True), (False, False)]), dtype=dtypes,
)  # fmt: skip
def test_masked_softmax_equals_reference(batch, heads, sides, shared, dtype):
    x = torch.randn(batch, heads, *sides).to(dtype)
    blocked = torch.rand(1 if shared[0] else batch, 1 if shared[1] else heads, *sides) < 0.5
    assert_parity(lambda x: scaled_masked_softmax(x, blocked, 0.7), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_do_not_matter(dtype):
    """Heads first, every second row, a slice of a wider tensor, and a gradient that is one number everywhere."""
    heads_first = torch.randn(3, 7, 8).transpose(0, 1).to(dtype)
    rows = torch.randn(14, 8)[::2].to(dtype)
    piece = torch.randn(7, 20)[:, 3:11].to(dtype)
    cos, sin = rotary_tables(torch.arange(7), 8, 100.0)
    assert_parity(lambda x: rotary(x, cos, sin), (heads_first,))
    assert_parity(lambda x: rotary(x, cos, sin, interleaved=True), (heads_first,))
    for x in (heads_first, rows, piece):
        assert_parity(swiglu, (x,))
        assert_parity(lambda x, w: rms_norm(x, w, 1e-6), (x, torch.ones(8).to(dtype)))
    y = piece.clone().requires_grad_()
    (rms_norm(y, torch.ones(8).to(dtype), 1e-6) + swiglu(torch.cat((y, y), dim=-1))).sum().backward()
    assert y.grad.shape == y.shape
