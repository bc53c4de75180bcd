# SPDX-License-Identifier: Apache-2.0
"""Tolerances of the checks in this directory.

docs/guides/checks.md lists the measurements behind each number.
"""

# fp32: only the order of sums differs. Largest difference measured over all families and layouts: 2.7e-6.
FP32_BOUND = 1e-5

# bf16: two bf16 results differ by about as much as each differs from fp32. The bound is this multiple of the difference
# between one process in bf16 and one process in fp32, for the same quantity.
BF16_MARGIN = 4.0
# Minimum relative rounding noise, because a quantity may be close to its fp32 value by chance.
BF16_NOISE = 2.0**-9
# A pack with another neighbouring sample has the same rounding, also in bf16; measured: 0.
BF16_NEIGHBOUR = 1e-4


def bound_of(noise: float | None) -> float:
    """The largest relative difference that passes.

    Args:
        noise: Relative difference between one process in bf16 and one in fp32; None: the check runs in fp32.
    """
    return FP32_BOUND if noise is None else BF16_MARGIN * max(noise, BF16_NOISE)


# `check alignment` in fp32: 20 times the largest difference measured over the tiny recipes of all families, 30 to 50
# steps. Differences grow with the steps, because rounding errors accumulate.
ALIGNMENT_BOUNDS = {
    "loss": 2e-5,  # mean relative difference over the steps; measured: 1.1e-6
    "grad_norm": 1e-4,  # the same of gradient norms before clipping; measured: 4.7e-6
    "parameters": 2e-3,  # change of the worst parameter by training; measured: 8.4e-5
}
