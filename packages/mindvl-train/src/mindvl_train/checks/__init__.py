# SPDX-License-Identifier: Apache-2.0
"""Proofs on the user's own model and data: packed equals unpacked, layouts and curves equal plain ones."""
