# SPDX-License-Identifier: Apache-2.0
"""Merge methods: a pure function each, with its source."""

from .average import average

METHODS = {"average": average}

__all__ = ["METHODS", "average"]
