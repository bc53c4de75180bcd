# SPDX-License-Identifier: Apache-2.0
"""What tests of operators share: tolerances by type, comparison of two implementations forward and backward."""

from .parity import TOLERANCES, assert_close, assert_parity, outputs_and_gradients

__all__ = ["TOLERANCES", "assert_close", "assert_parity", "outputs_and_gradients"]
