# SPDX-License-Identifier: Apache-2.0
"""Average LoRA adapters in PEFT directories; run.py calls this package if all models of a merge are adapters."""

from .average import check_adapters, merge_adapters
from .checks import are_adapters
from .peft_directory import FOLD_HINT, model_directory_problem

__all__ = ["FOLD_HINT", "are_adapters", "check_adapters", "merge_adapters", "model_directory_problem"]
