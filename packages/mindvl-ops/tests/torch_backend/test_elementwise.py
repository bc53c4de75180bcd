# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, rotary and SwiGLU of the torch backend equal the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_ops import rms_norm, rotary, swiglu
from mindvl_ops.testing import assert_parity

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@settings(max_examples=30, deadline=None)
@given(leading=st.lists(st.integers(0, 5), min_size=1, max_size=3), width=st.integers(1, 20), dtype=dtypes)
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
