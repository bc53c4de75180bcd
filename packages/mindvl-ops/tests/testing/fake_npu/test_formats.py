# SPDX-License-Identifier: Apache-2.0
"""Formats are remembered and change nothing; casts; the deprecated convolution."""

import pytest
import torch

from mindvl_ops.testing.fake_npu import RefusedError


def test_a_format_changes_neither_values_nor_shape_and_is_remembered(fake_npu):
    npu, x = fake_npu.torch_npu, torch.arange(6.0).view(2, 3)
    y = npu.npu_format_cast(x, npu.Format.FRACTAL_NZ)
    assert torch.equal(x, y)
    assert npu.get_npu_format(y) == 29
    assert npu.get_npu_format(x) == npu.Format.ND == 2
    assert npu.get_npu_format(torch.zeros(1, 2, 3, 4)) == npu.Format.NCHW
    with pytest.raises(RefusedError, match="28 is no format"):
        npu.npu_format_cast(x, 28)


def test_a_cast_has_a_gradient_in_the_type_it_came_from(fake_npu):
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    y = fake_npu.torch_npu.npu_dtype_cast(x, torch.float32)
    y.sum().backward()
    assert y.dtype == torch.float32
    assert x.grad.dtype == torch.bfloat16
    with pytest.raises(RefusedError, match="99 is the number of no known type"):
        fake_npu.torch_npu.npu_dtype_cast(x, 99)


def test_the_convolution_needs_every_argument_and_is_a_matmul_on_one_patch(fake_npu):
    x, weight, bias = torch.randn(5, 3, 2, 4, 4), torch.randn(8, 3, 2, 4, 4), torch.randn(8)
    npu = fake_npu.torch_npu
    y = npu.npu_conv3d(x, weight, bias, [2, 4, 4], [0, 0, 0], [1, 1, 1], 1)
    torch.testing.assert_close(y.flatten(1), x.flatten(1) @ weight.flatten(1).T + bias, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="missing value for argument 'dilation'"):
        npu.npu_conv3d(x, weight, bias, [2, 4, 4], [0, 0, 0])
    for change, words in (
        ((x[0], weight, bias, [2, 4, 4]), "must have rank 5"),
        ((x, weight, bias, [2]), "must have three values"),
        ((x[:, :2], weight, bias, [2, 4, 4]), "2 channels do not fit"),
    ):
        with pytest.raises(RefusedError, match=words):
            npu.npu_conv3d(*change, [0, 0, 0], [1, 1, 1], 1)
