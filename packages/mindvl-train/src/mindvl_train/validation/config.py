# SPDX-License-Identifier: Apache-2.0
"""The `validation` section of a recipe.

Part of config.py's RunConfig; validator.py and generations.py use it.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mindvl_data import SourceConfig


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Answers of the model to fixed prompts, greedy, after each validation."""

    # JSON lines file of prompts: {"prompt": TEXT, "images": [FILE, ...]}; relative image files start at its directory;
    # None: no prompts from a file.
    prompts: Path | None = None
    first_samples: int = 0  # prompts from this many first samples of each validation source, without their answers
    # Maximum number of tokens of an answer. Each token costs one forward pass over its prompt and the answer so far.
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        if self.first_samples < 0 or self.first_samples > 1000:
            raise ValueError(f"first_samples: must be between 0 and 1000, got {self.first_samples}. Use for example 4.")
        if not 1 <= self.max_new_tokens <= 4096:
            raise ValueError(
                f"max_new_tokens: must be between 1 and 4096, got {self.max_new_tokens}. Use for example 64."
            )
        if self.prompts is None and not self.first_samples:
            raise ValueError(
                "prompts and first_samples: neither is set. Name a file of prompts, or set first_samples=4."
            )


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Loss on held-out samples while the run trains; it does not change what the run trains."""

    # Held-out datasets, with the fields of `data.sources`; each sample is used once, so `max_epochs` must not be set.
    sources: tuple[SourceConfig, ...]
    every_steps: int = 500  # optimizer steps between two validations; the last step of the run is always validated
    # Maximum number of packed sequences of one validation, the same ones each time; None: all samples.
    max_packs: int | None = None
    allow_overlap: bool = False  # Warn instead of refusing if a shard is also in `data.sources`.
    # Name of the source whose loss chooses the best checkpoint and ends the run; None: the loss of all sources.
    measure: str | None = None
    # End the run after this many validations in succession without a lower loss; None: never.
    patience: int | None = None
    min_delta: float = 0.0  # decrease of the loss that counts as lower for `patience`, in nats per token
    generations: GenerationConfig | None = None  # Answers to fixed prompts after each validation; None: none.

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        if not names:
            raise ValueError("sources: the list is empty. Add at least one directory of indexed shards.")
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise ValueError(f"sources: the names {twice} are used twice. Give every source a unique name.")
        for source in self.sources:
            if source.max_epochs not in (None, 1):
                raise ValueError(
                    f"sources: source {source.name!r} has max_epochs={source.max_epochs}, but a validation uses each "
                    "sample once. Remove max_epochs."
                )
        if self.measure is not None and self.measure not in names:
            raise ValueError(
                f"measure: {self.measure!r} is not a validation source. Use one of {', '.join(names)}, or remove it."
            )
        for name in ("every_steps", "max_packs", "patience"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 10**9:
                raise ValueError(f"{name}: must be between 1 and 1,000,000,000, got {value}.")
        if not 0 <= self.min_delta < math.inf:
            raise ValueError(f"min_delta: must be a finite number >= 0, got {self.min_delta}. Use for example 0.01.")
