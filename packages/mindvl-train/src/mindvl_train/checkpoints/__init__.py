# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: written whole or not at all, found again, loaded into any layout, made into directories for transformers."""
