# SPDX-License-Identifier: Apache-2.0
"""The bound in fp32 is one number; in bf16 it follows the rounding noise, which chance cannot make too small."""

import pytest

from mindvl_train.checks.bounds import BF16_MARGIN, FP32_BOUND, bound_of


@pytest.mark.parametrize(
    ("noise", "bound"),
    [(None, 1e-5), (0.0, 4 / 512), (1e-6, 4 / 512), (0.01, 0.04)],
)
def test_the_bound_follows_the_noise(noise: float | None, bound: float) -> None:
    assert bound_of(noise) == pytest.approx(bound)
    assert FP32_BOUND < BF16_MARGIN / 512
