# SPDX-License-Identifier: Apache-2.0
"""Patch embedding equals the convolution it replaces, and its weights go both ways."""

import pytest
import torch
import torch.nn.functional as F

from mindvl_ops import (
    OpsConfig,
    OpsError,
    conv_as_matmul,
    conv_weight_to_matmul,
    matmul_weight_to_conv,
    patch_embed,
    select_backends,
)
from mindvl_ops.patch_embed import patch_embed_reference, unfold_patches


@pytest.mark.parametrize("kernel", [(3, 4, 4), (3, 2, 4, 4)])
def test_the_matmul_equals_the_convolution(kernel):
    weight, patches = torch.randn(5, *kernel), torch.randn(7, *kernel)
    convolution = F.conv2d if len(kernel) == 3 else F.conv3d
    expected = convolution(patches, weight).flatten(1)
    torch.testing.assert_close(patch_embed(patches.flatten(1), conv_weight_to_matmul(weight)), expected)


@pytest.mark.parametrize("kernel", [(3, 4, 4), (3, 2, 4, 4)])
def test_weights_come_back_unchanged(kernel):
    weight = torch.randn(5, *kernel)
    assert torch.equal(matmul_weight_to_conv(conv_weight_to_matmul(weight), kernel), weight)


def test_a_kernel_that_does_not_fit_is_refused():
    with pytest.raises(OpsError, match=r"\[5, 48\] does not fit kernel \(3, 4, 5\)"):
        matmul_weight_to_conv(torch.zeros(5, 48), (3, 4, 5))
    with pytest.raises(OpsError, match=r"shape \[5, 48\]"):
        conv_weight_to_matmul(torch.zeros(5, 48))


@pytest.mark.parametrize(
    ("image", "kernel"),
    [((3, 8, 12), (4, 3)), ((3, 9, 13), (4, 3)), ((3, 4, 8, 6), (2, 4, 3)), ((1, 2, 4, 3), (2, 4, 3))],
)
@pytest.mark.parametrize("way", ["matmul", "convolution"])
def test_any_convolution_without_overlap_is_a_matmul(image, kernel, way):
    generator = torch.Generator().manual_seed(0)
    x, bias = torch.randn(2, *image, generator=generator).double(), torch.randn(5, generator=generator).double()
    weight = torch.randn(5, image[0], *kernel, generator=generator).double()
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    convolution = F.conv2d if len(kernel) == 2 else F.conv3d
    expected = convolution(x, weight, bias, stride=kernel)
    select_backends(OpsConfig(patch_embed=way))
    actual = conv_as_matmul(x, weight, bias)
    select_backends(OpsConfig(backend="torch"))
    torch.testing.assert_close(actual, expected)
    grad = torch.randn(expected.shape, generator=generator).double()
    gradients = [torch.autograd.grad(result, inputs, grad) for result in (actual, expected)]
    torch.testing.assert_close(*gradients)


def test_the_convolution_needs_its_kernel():
    select_backends(OpsConfig(patch_embed="convolution"))
    try:
        with pytest.raises(OpsError, match="kernel of the convolution is not known"):
            patch_embed(torch.zeros(2, 12), torch.zeros(4, 12))
        assert patch_embed(torch.zeros(2, 12), torch.zeros(4, 12), kernel=(3, 2, 2)).shape == (2, 4)
    finally:
        select_backends(OpsConfig(backend="torch"))


def test_reference_gradients_are_right_in_float64():
    inputs = [torch.randn(*shape).double().requires_grad_() for shape in ((3, 6), (4, 6), (4,))]
    assert torch.autograd.gradcheck(lambda x, w, b: patch_embed_reference(x, w, b, None), inputs)


def test_an_image_of_another_rank_is_refused():
    with pytest.raises(OpsError, match=r"\[2, 3, 8\] does not fit kernel"):
        unfold_patches(torch.zeros(2, 3, 8), (3, 2, 2))
