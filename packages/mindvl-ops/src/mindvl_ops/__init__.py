# SPDX-License-Identifier: Apache-2.0
"""Operators for packed multimodal training: contracts, plain PyTorch references, fast twins."""
