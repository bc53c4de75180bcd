# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels, run by Triton's interpreter, equal the reference forward and backward, also at awkward shapes.

The interpreter truncates where a device rounds to bfloat16, so roundings are tested in float16.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_ops import (
    HeadNorms,
    OpsError,
    add_rms_norm,
    rms_norm,
    rotary,
    rotary_qkv,
    swiglu,
    use_backend,
)
from mindvl_ops.cases import cases
from mindvl_ops.norm import add_rms_norm_reference
from mindvl_ops.rotary_qkv import rotary_qkv_reference
from mindvl_ops.testing import assert_parity
from mindvl_ops.triton_backend import elementwise, library

OPERATORS = ["add_rms_norm", "rms_norm", "rotary", "rotary_qkv", "swiglu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = st.sampled_from(DTYPES)


def joined(*results):
    return torch.cat([result.flatten() for result in results])


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(leading=st.lists(st.integers(0, 4), min_size=1, max_size=2), width=st.integers(2, 40), dtype=dtypes)
def test_norms_equal_the_reference(leading, width, dtype):
    x, residual = (torch.randn(*leading, width).to(dtype) for _ in range(2))
    weight = torch.randn(width).to(dtype)
    assert_parity(lambda x, w: rms_norm(x, w, 1e-6), (x, weight), backend="triton")
    assert_parity(lambda x, y, w: joined(*add_rms_norm(x, y, w, 1e-6)), (x, residual, weight), backend="triton")


@settings(max_examples=10, deadline=None)
@given(leading=st.lists(st.integers(0, 4), min_size=1, max_size=2), half=st.integers(1, 40), dtype=dtypes)
def test_swiglu_equals_the_reference(leading, half, dtype):
    assert_parity(swiglu, (torch.randn(*leading, 2 * half).to(dtype),), backend="triton")


def test_swiglu_takes_rows_wider_than_one_block():
    assert_parity(swiglu, (torch.randn(2, 2 * library._SWIGLU_BLOCK + 6),), backend="triton")


@settings(max_examples=10, deadline=None)
@given(
    tokens=st.integers(0, 9), heads=st.integers(1, 3), half=st.integers(1, 6), interleaved=st.booleans(), dtype=dtypes
)
def test_rotary_equals_the_reference(tokens, heads, half, interleaved, dtype):
    cos, sin = torch.randn(tokens, 2 * half), torch.randn(tokens, 2 * half)
    x = torch.randn(tokens, heads, 2 * half).to(dtype)
    assert_parity(lambda x: rotary(x, cos, sin, interleaved), (x,), backend="triton")


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    tokens=st.integers(0, 9), groups=st.integers(1, 2), heads=st.integers(1, 3), half=st.integers(1, 6),
    has_norms=st.booleans(), dtype=dtypes,
)  # fmt: skip
def test_heads_of_a_projection_equal_the_reference(tokens, groups, heads, half, has_norms, dtype):
    cos, sin = torch.randn(tokens, 2 * half), torch.randn(tokens, 2 * half)
    qkv = torch.randn(tokens, groups, (heads + 2) * 2 * half).to(dtype)
    weights = [torch.randn(2 * half).to(dtype) for _ in range(2)] if has_norms else []

    def heads_of(qkv, *weights):
        return joined(*rotary_qkv(qkv, cos, sin, HeadNorms(*weights, 1e-6) if weights else None))

    assert_parity(heads_of, (qkv, *weights), backend="triton")


@pytest.mark.slow
@pytest.mark.parametrize("programs", [1, 3])
def test_a_backward_pass_with_fewer_programs_than_rows_sums_the_same(monkeypatch, programs):
    """On a device 512 programs share the rows; here a program has many rows and the last ones have fewer."""
    monkeypatch.setattr(library, "PROGRAMS", programs)
    assert_parity(lambda x, w: rms_norm(x, w, 1e-6), (torch.randn(8, 12), torch.randn(12)), backend="triton")
    cos, sin = torch.randn(23, 8), torch.randn(23, 8)
    assert_parity(
        lambda qkv, a, b: joined(*rotary_qkv(qkv, cos, sin, HeadNorms(a, b, 1e-6))),
        (torch.randn(23, 2, 32), torch.randn(8), torch.randn(8)),
        backend="triton",
    )


def test_the_sum_is_rounded_before_it_is_normalized_and_each_result_once():
    x, residual, weight = (torch.randn(shape).half() for shape in ((9, 64), (9, 64), (64,)))
    with use_backend("triton"):
        normed, total = add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_total = add_rms_norm_reference(x, residual, weight, 1e-6)
    assert torch.equal(total, expected_total)
    assert (normed != expected).float().mean() < 0.01  # float32 sums in another order round a few values otherwise
    torch.testing.assert_close(normed, expected, rtol=2**-10, atol=0)  # and those by one unit in the last place


def test_normalized_heads_are_rounded_before_they_are_rotated():
    qkv, cos, sin = torch.randn(16, 2, 64).half(), torch.randn(16, 16), torch.randn(16, 16)
    norms = HeadNorms(torch.randn(16).half(), torch.randn(16).half(), 1e-6)
    with use_backend("triton"):
        actual = rotary_qkv(qkv, cos, sin, norms)
    expected = rotary_qkv_reference(qkv, cos, sin, norms)
    assert all((a != b).float().mean() < 0.01 for a, b in zip(actual, expected, strict=True))
    once = rotary_qkv_reference(qkv.float(), cos, sin, HeadNorms(*(w.float() for w in norms[:2]), 1e-6))[0].half()
    assert (once != expected[0]).float().mean() > 0.1  # one rounding alone would be visible here


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter(dtype):
    """Slices of wider tensors are read in place; heads first and transposed rows are copied."""
    piece, rows = torch.randn(7, 20)[:, 3:11].to(dtype), torch.randn(8, 7).t().to(dtype)
    wide, heads_first = torch.randn(7, 3, 20)[..., 4:12].to(dtype), torch.randn(3, 7, 8).transpose(0, 1).to(dtype)
    every_second = torch.randn(7, 3, 16)[..., ::2].to(dtype)
    cos, sin, ones = torch.randn(7, 8), torch.randn(7, 8), torch.ones(8).to(dtype)
    for x in (piece, rows):
        assert_parity(swiglu, (x,), backend="triton")
        assert_parity(lambda x, w: joined(*add_rms_norm(x, x, w, 1e-6)), (x, ones), backend="triton")
    for x in (wide, heads_first, every_second):
        assert_parity(lambda x: rotary(x, cos, sin, True), (x,), backend="triton")
    for x in (torch.randn(7, 2, 40)[..., 4:28].to(dtype), torch.randn(7, 60)[:, 2:50].view(7, 2, 24).to(dtype)):
        assert_parity(lambda x: joined(*rotary_qkv(x, cos, sin)), (x,), backend="triton")


def test_a_gradient_that_is_one_number_everywhere_is_accepted():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    with use_backend("triton"):
        (rms_norm(x, weight, 1e-6).sum() + swiglu(x).sum() + rotary(x[:, None], x, x).sum()).backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_of_a_sum_and_its_norm_may_stay_unused(used):
    x, y, w = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    assert_parity(lambda x, y, w: add_rms_norm(x, y, w, 1e-6)[used] + 0 * w, (x, y, w), backend="triton")


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_second_derivatives_are_those_of_the_reference(operator):
    case = cases(torch.float32, tokens=32)[operator]
    gradients = []
    for backend in ("reference", "triton"):
        leaves = [x.detach().clone().requires_grad_() for x in case.inputs]
        with use_backend(backend):
            output = case.function(*leaves)
            first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
            gradients.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("operator", OPERATORS)
def test_float64_is_refused(operator):
    case = cases(torch.float64, tokens=32)[operator]
    with (
        use_backend("triton"),
        pytest.raises(OpsError, match=f"triton {operator}: x is torch.float64: the kernel takes"),
    ):
        case.function(*case.inputs)


def test_rows_that_do_not_fit_into_one_program_are_refused(monkeypatch):
    monkeypatch.setattr(elementwise, "MAX_NORM_WIDTH", 8)
    with use_backend("triton"), pytest.raises(OpsError, match="rows of 9 values: the kernel takes at most 8"):
        rms_norm(torch.randn(2, 9), torch.randn(9), 1e-6)


@pytest.mark.parametrize("operator", OPERATORS)
def test_without_the_interpreter_tensors_of_a_processor_are_refused(operator, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    case = cases(torch.float32, tokens=32)[operator]
    with use_backend("triton"), pytest.raises(OpsError, match=f"triton {operator}: the tensor is on cpu"):
        case.function(*case.inputs)
