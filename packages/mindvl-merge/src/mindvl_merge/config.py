# SPDX-License-Identifier: Apache-2.0
"""Configuration of a merge, read from a recipe and passed to `merge`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import MergeConfigError


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """One merge of transformers model directories."""

    models: tuple[Path, ...]  # the first one also provides configuration, tokenizer, processor and Python files
    out: Path  # new directory
    method: Literal["average"] = "average"  # how weights are combined
    weights: tuple[float, ...] | None = None  # one per model, with sum 1; None: equal weights
    any_weight_sum: bool = False  # accept weights that do not sum to 1
    only: tuple[str, ...] = ()  # name prefixes of tensors to merge; others are copied from the first model; empty: all
    dtype: Literal["fp32", "bf16", "fp16"] | None = None  # of the merged tensors; None: that of the inputs
    allow_different: tuple[str, ...] = ()  # configuration and tokenizer keys that may differ
    overwrite: bool = False  # replace an existing `out`
    max_shard_bytes: int = 5_000_000_000  # maximum size of one weight file

    def __post_init__(self) -> None:
        if not self.models:
            raise MergeConfigError("models: is empty. Name at least one directory.")
        for path in (*self.models, self.out):
            if "\0" in str(path):
                raise MergeConfigError(f"{str(path)!r:.200}: the path has a null character. Choose another path.")
        if self.max_shard_bytes <= 0:
            raise MergeConfigError(
                f"max_shard_bytes: must be positive, got {self.max_shard_bytes}. Use for example 5000000000."
            )
        if self.weights is None:
            return
        if len(self.weights) != len(self.models):
            raise MergeConfigError(
                f"weights: got {len(self.weights)} weights for {len(self.models)} models. Give one weight per model, or none "
                "for equal weights."
            )
        if not all(math.isfinite(weight) for weight in self.weights):
            raise MergeConfigError(f"weights: must be finite, got {list(self.weights)}. Give finite numbers.")
        total = math.fsum(self.weights)
        if abs(total - 1) > 1e-6 and not self.any_weight_sum:
            raise MergeConfigError(
                f"weights: must sum to 1, got {list(self.weights)} with sum {total:g}. Correct them, remove them for equal "
                "weights, or set any_weight_sum."
            )

    @property
    def torch_dtype(self) -> str | None:
        """`dtype` by its name in torch and in config.json."""
        return None if self.dtype is None else {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[self.dtype]

    @property
    def model_weights(self) -> tuple[float, ...]:
        """One weight per model; equal weights by default."""
        return self.weights if self.weights is not None else (1 / len(self.models),) * len(self.models)
