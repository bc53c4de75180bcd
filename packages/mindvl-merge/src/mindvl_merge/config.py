# SPDX-License-Identifier: Apache-2.0
"""What to merge, how, and where to: read from a recipe, handed to `merge`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import MergeConfigError


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """One merge of model directories in the transformers layout."""

    models: tuple[Path, ...]  # the first one also gives config, tokenizer, processor and remote code
    out: Path  # new directory
    method: Literal["average"] = "average"  # how weights are combined
    weights: tuple[float, ...] | None = None  # one per model, summing to 1; not given: equal weights
    any_weight_sum: bool = False  # accept weights that do not sum to 1
    only: tuple[str, ...] = ()  # prefixes of tensor names to merge, the rest is copied from the first model; empty: all
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # of the merged tensors; not given: as in the inputs
    allow_different: tuple[str, ...] = ()  # keys of config.json and the like that may differ although they matter
    overwrite: bool = False  # replace an existing `out`
    max_shard_bytes: int = 5_000_000_000  # larger models are written in several files

    def __post_init__(self) -> None:
        if not self.models:
            raise MergeConfigError("models: no model is given. Name at least one directory.")
        for path in (*self.models, self.out):
            if "\0" in str(path):
                raise MergeConfigError(f"{str(path)!r:.200}: a path cannot hold a null character. Choose another path.")
        if self.max_shard_bytes <= 0:
            raise MergeConfigError(f"max_shard_bytes: {self.max_shard_bytes} is not positive. Use 5000000000.")
        if self.weights is None:
            return
        if len(self.weights) != len(self.models):
            raise MergeConfigError(
                f"weights: {len(self.weights)} weights for {len(self.models)} models. Give one per model, or none for "
                "equal ones."
            )
        if not all(math.isfinite(weight) for weight in self.weights):
            raise MergeConfigError(f"weights: {list(self.weights)} are not all finite. Give finite numbers.")
        total = math.fsum(self.weights)
        if abs(total - 1) > 1e-6 and not self.any_weight_sum:
            raise MergeConfigError(
                f"weights: {list(self.weights)} sum to {total:g}, not 1. Correct them, leave them out for equal "
                "weights, or set any_weight_sum if that is meant."
            )

    @property
    def model_weights(self) -> tuple[float, ...]:
        """One weight per model, equal ones if none were given."""
        return self.weights if self.weights is not None else (1 / len(self.models),) * len(self.models)
