# SPDX-License-Identifier: Apache-2.0
"""How far two computations of the same thing may be apart in the checks of this directory.

Comes before the checks. docs/guides/checks.md lists the measurements behind each number.
"""

# fp32: sums in another order, and nothing more. Largest difference measured over all families and layouts: 2.7e-6.
FP32_BOUND = 1e-5

# bf16: two roundings of one computation differ by about as much as each differs from fp32. So the bound is this many
# times the difference that one process in bf16 has to one process in fp32, for the same quantity.
BF16_MARGIN = 4.0
# A quantity may come near to its fp32 value by chance, so its rounding noise counts as at least this much, relative.
BF16_NOISE = 2.0**-9
# The same pack with another neighbour is rounded in the same places, in bf16 too; measured: 0.
BF16_NEIGHBOUR = 1e-4


def bound_of(noise: float | None) -> float:
    """The largest relative difference that passes.

    Args:
        noise: In bf16, the relative difference of one process to the same in fp32; None: everything is in fp32.
    """
    return FP32_BOUND if noise is None else BF16_MARGIN * max(noise, BF16_NOISE)


# `check alignment` in fp32: 20 times the largest difference measured over the tiny recipes of all families, 30 to 50
# steps. They grow with the steps, because each update starts from the rounding errors of the ones before.
ALIGNMENT_BOUNDS = {
    "loss": 2e-5,  # mean relative difference over the steps; measured: 1.1e-6
    "grad_norm": 1e-4,  # the same of gradient norms before clipping; measured: 4.7e-6
    "parameters": 2e-3,  # of what training changed in the worst parameter; measured: 8.4e-5
}
