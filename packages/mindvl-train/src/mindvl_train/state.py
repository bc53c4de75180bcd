# SPDX-License-Identifier: Apache-2.0
"""What changes while training and must survive a stop: everything a checkpoint restores."""

from dataclasses import dataclass, field
from typing import Any

import torch

from mindvl_train.interfaces import BatchSource

_COUNTERS = {"step", "loss_tokens", "tokens", "skipped", "consecutive_skips", "placeholders", "norms", "losses"}


@dataclass
class TrainState:
    """Model, optimizer, data and counters of a run.

    No random state: no layer draws numbers during a step, and the data plan is a function of its seed.
    """

    models: list[torch.nn.Module]  # chunks of the model on this pipeline stage, wrapped in gradient buffers
    optimizer: Any
    source: BatchSource
    step: int = 0  # finished steps, those that were left out included
    loss_tokens: int = 0  # loss tokens so far, over all ranks
    tokens: int = 0  # tokens so far, over all ranks, padding included
    skipped: int = 0  # steps left out because they were bad
    consecutive_skips: int = 0
    placeholders: int | None = 0  # samples that could not be used so far, over all ranks; None: an older run lost count
    norms: list[float] = field(default_factory=list)  # gradient norms of the last updates, oldest first
    losses: list[float] = field(default_factory=list)  # their mean losses

    def counters(self) -> dict[str, Any]:
        """What a manifest keeps, as plain JSON values."""
        return {name: getattr(self, name) for name in _COUNTERS}

    def restore(self, counters: dict[str, Any]) -> None:
        """Take the counters of a manifest; those that an older one lacks stay as they are."""
        self.placeholders = None
        for name in _COUNTERS & counters.keys():
            setattr(self, name, counters[name])
