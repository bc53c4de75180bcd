# SPDX-License-Identifier: Apache-2.0
"""Rehearsal: one process plays one rank of a job of any size, with fake device tensors and fake process groups."""
