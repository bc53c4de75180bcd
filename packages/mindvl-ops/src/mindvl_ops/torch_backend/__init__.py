# SPDX-License-Identifier: Apache-2.0
"""Twins of every operator on the best that PyTorch has; importing this enters them in the registry."""

from . import adamw, attention, elementwise, loss, moe

__all__ = ["adamw", "attention", "elementwise", "loss", "moe"]
