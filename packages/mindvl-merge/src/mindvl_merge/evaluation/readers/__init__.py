# SPDX-License-Identifier: Apache-2.0
"""Readers of benchmark files: VLMEvalKit's TSV, Hugging Face parquet as lmms-eval uses it, and our JSONL."""

from .files import load_benchmarks, recognize

__all__ = ["load_benchmarks", "recognize"]
