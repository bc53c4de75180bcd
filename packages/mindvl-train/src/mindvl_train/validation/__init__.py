# SPDX-License-Identifier: Apache-2.0
"""Validation of a run on held-out samples: losses, generations, the best checkpoint, early stopping."""
