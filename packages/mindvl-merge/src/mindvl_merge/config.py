# SPDX-License-Identifier: Apache-2.0
"""Configuration of a merge, read from a recipe and passed to `merge`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .errors import MergeConfigError

Method = Literal["average", "task_arithmetic", "slerp", "ties", "dare_linear", "dare_ties"]
WITH_BASE = ("task_arithmetic", "ties", "dare_linear", "dare_ties")  # methods of differences from a base model
DROPPING = ("ties", "dare_linear", "dare_ties")  # methods whose result does not depend on every value of the models

_SUM_TO_ONE = ("average", "slerp")


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """One merge of transformers model directories."""

    models: tuple[Path, ...]  # the first one also provides configuration, tokenizer, processor and Python files
    out: Path  # directory of the merged model; it must not exist unless `overwrite` is set
    method: Method = "average"  # merge method
    base: Path | None = None  # model that the others were trained from; required by all methods but average and slerp
    weights: tuple[float, ...] | None = None  # weight of each model; None: equal with sum 1, or 1 each with a base
    part_weights: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # weights by part, prefix or pattern
    scale: float = 1.0  # factor of the merged difference, for methods with a base
    density: float = 0.5  # share of each difference that ties and dare keep, above 0 and at most 1
    seed: int = 0  # random seed of the values that dare drops
    any_weight_sum: bool = False  # accept weights that do not sum to 1
    only: tuple[str, ...] = ()  # parts (vision, projector, language), prefixes or patterns to merge; empty: all
    match_tokens: bool = False  # match rows of embedding and output layer by token; also done if `only` is language
    allow_missing: tuple[str, ...] = ()  # parts, prefixes or patterns of tensors that only some of the models have
    dtype: Literal["fp32", "bf16", "fp16"] | None = None  # data type of the merged tensors; None: that of the models
    allow_different: tuple[str, ...] = ()  # configuration and tokenizer keys that may differ
    overwrite: bool = False  # replace an existing `out`
    max_shard_bytes: int = 5_000_000_000  # maximum size of one weight file

    def __post_init__(self) -> None:
        if not self.models:
            raise MergeConfigError("models: is empty. Name at least one directory.")
        for path in (*self.models, self.out, *([self.base] if self.base else [])):
            if "\0" in str(path):
                raise MergeConfigError(f"{str(path)!r:.200}: the path has a null character. Choose another path.")
        if self.max_shard_bytes <= 0:
            raise MergeConfigError(
                f"max_shard_bytes: must be positive, got {self.max_shard_bytes}. Use for example 5000000000."
            )
        self._check_method()
        if self.weights is not None:
            self._check_weights("weights", self.weights)
        for pattern, weights in self.part_weights.items():
            self._check_weights(f"part_weights.{pattern}", weights)

    @property
    def torch_dtype(self) -> str | None:
        """`dtype` by its name in torch and in config.json."""
        return None if self.dtype is None else {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[self.dtype]

    @property
    def is_language_only(self) -> bool:
        """Whether the language model alone is merged, so that the other parts may differ or be missing."""
        return self.only == ("language",)

    @property
    def model_weights(self) -> tuple[float, ...]:
        """One weight per model: those of the configuration or the default."""
        if self.weights is not None:
            return self.weights
        return (1.0 if self.method in WITH_BASE else 1 / len(self.models),) * len(self.models)

    @property
    def parents(self) -> tuple[Path, ...]:
        """All directories that are read: the models, then the base model if there is one."""
        return self.models if self.base is None else (*self.models, self.base)

    def _check_method(self) -> None:
        if self.method in WITH_BASE and self.base is None:
            raise MergeConfigError(
                f"base: is required by method {self.method}. Name the directory that the models were trained from."
            )
        if self.method not in WITH_BASE and self.base is not None:
            raise MergeConfigError(
                f"base: {self.base} is not used by method {self.method}. Remove it, or choose one of {', '.join(WITH_BASE)}."
            )
        if self.method == "slerp" and len(self.models) != 2:
            raise MergeConfigError(f"models: slerp needs exactly two models, got {len(self.models)}. Name two models.")
        if not 0 < self.density <= 1:
            raise MergeConfigError(f"density: must be above 0 and at most 1, got {self.density}. Use for example 0.5.")
        if not math.isfinite(self.scale):
            raise MergeConfigError(f"scale: must be finite, got {self.scale}. Use for example 1.0.")
        if not 0 <= self.seed < 2**63:
            raise MergeConfigError(f"seed: must be >= 0 and below 2^63, got {self.seed}. Use for example 0.")

    def _check_weights(self, where: str, weights: tuple[float, ...]) -> None:
        if len(weights) != len(self.models):
            raise MergeConfigError(
                f"{where}: got {len(weights)} weights for {len(self.models)} models. Give one weight per model, or none "
                "for equal weights."
            )
        if not all(math.isfinite(weight) for weight in weights):
            raise MergeConfigError(f"{where}: must be finite, got {list(weights)}. Give finite numbers.")
        total = math.fsum(weights)
        if self.method in _SUM_TO_ONE and abs(total - 1) > 1e-6 and not self.any_weight_sum:
            raise MergeConfigError(
                f"{where}: must sum to 1, got {list(weights)} with sum {total:g}. Correct them, remove them for equal "
                "weights, or set any_weight_sum."
            )
