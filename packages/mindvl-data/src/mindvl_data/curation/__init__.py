# SPDX-License-Identifier: Apache-2.0
"""Curation of training data: raw samples and documents -> clean, deduplicated, balanced shards.

Steps are functions over batches of records (step.py); engines only move batches. Source: appendix B of the MindVL paper.
"""
