# SPDX-License-Identifier: Apache-2.0
"""Ways to make one tensor of several: a pure function each, with its source."""

from .average import average

METHODS = {"average": average}

__all__ = ["METHODS", "average"]
