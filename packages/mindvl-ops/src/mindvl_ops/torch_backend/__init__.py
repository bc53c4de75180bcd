# SPDX-License-Identifier: Apache-2.0
"""Implementations of every operator with the fastest operators of PyTorch; importing this package registers them."""

from . import adamw, attention, elementwise, loss, moe

__all__ = ["adamw", "attention", "elementwise", "loss", "moe"]
