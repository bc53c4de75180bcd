# SPDX-License-Identifier: Apache-2.0
"""The contract simulator: torch_npu's schemas, refusals, values and missing gradients, on a CPU."""

from . import attention, cross_entropy, elementwise, formats, gating, grouped_matmul, moe, norm, optimisers, rotary
from .calls import Call, TensorSpec
from .simulator import FakeNpu, simulate
from .state import RefusedError
from .strict import Strict

_OPERATORS = (attention, cross_entropy, elementwise, formats, gating, grouped_matmul, moe, norm, optimisers, rotary)

__all__ = ["Call", "FakeNpu", "RefusedError", "Strict", "TensorSpec", "simulate"]
