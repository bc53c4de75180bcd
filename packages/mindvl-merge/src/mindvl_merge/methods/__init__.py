# SPDX-License-Identifier: Apache-2.0
"""Merge methods: pure functions of blocks of values, each with its source."""

from .average import average
from .dare import dare
from .slerp import angle, slerp
from .task_arithmetic import task_arithmetic
from .ties import thresholds, ties

__all__ = ["angle", "average", "dare", "slerp", "task_arithmetic", "thresholds", "ties"]
