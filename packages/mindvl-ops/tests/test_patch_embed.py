# SPDX-License-Identifier: Apache-2.0
"""Patch embedding equals the convolution it replaces, and its weights go both ways."""

import pytest
import torch
import torch.nn.functional as F

from mindvl_ops import OpsError, conv_weight_to_matmul, matmul_weight_to_conv, patch_embed


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
