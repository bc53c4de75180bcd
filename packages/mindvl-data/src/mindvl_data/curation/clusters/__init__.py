# SPDX-License-Identifier: Apache-2.0
"""Diversity: embeddings, hierarchical clusters, labels of people, and sampling by the variance of clusters.

Source: appendix B.1.1 of the MindVL paper.
"""
