# SPDX-License-Identifier: Apache-2.0
"""Duplicates: exact, perceptual, of similar text, and of similar embeddings.

Each step signs records in batches, finds pairs of duplicates by external sorting (sorting.py), joins pairs to groups
(groups.py), and keeps one record of each group. Source: appendix B.1.1 of the MindVL paper filters noisy pairs.
"""
