# SPDX-License-Identifier: Apache-2.0
"""Metrics of the benchmarks of the paper, as VLMEvalKit and lmms-eval define them, and strict ones."""

from .aggregate import aggregate
from .registry import METRICS, find_metric, score

__all__ = ["METRICS", "aggregate", "find_metric", "score"]
