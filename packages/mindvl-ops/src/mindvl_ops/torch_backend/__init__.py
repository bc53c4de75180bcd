# SPDX-License-Identifier: Apache-2.0
"""Twins of every operator on the best that PyTorch has; importing this enters them in the registry."""

from . import adamw, attention, dense, elementwise

__all__ = ["adamw", "attention", "dense", "elementwise"]
