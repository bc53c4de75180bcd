# SPDX-License-Identifier: Apache-2.0
"""Training state: everything that changes during training and is restored from a checkpoint."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from mindvl_train.interfaces import BatchSource
from mindvl_train.validation.progress import ValidationProgress

_COUNTERS = {
    *("step", "loss_tokens", "tokens", "skipped", "consecutive_skips", "repeated", "placeholders", "norms", "losses"),
}


@dataclass
class TrainState:
    """Model, optimizer, data and counters of a run.

    There is no random state: no layer draws random numbers, and the data order is a pure function of its seed.
    """

    models: list[torch.nn.Module]  # model chunks of this pipeline rank, wrapped in gradient buffers
    optimizer: Any
    source: BatchSource
    step: int = 0  # finished steps, including skipped ones
    loss_tokens: int = 0  # loss tokens so far, over all ranks
    tokens: int = 0  # tokens so far, over all ranks, padding included
    skipped: int = 0  # skipped anomalous steps
    consecutive_skips: int = 0
    repeated: int = 0  # steps that were computed twice, because rows did not fit into an expert message
    placeholders: int | None = 0  # failed samples so far, over all ranks; None: unknown, resumed from an older version
    norms: list[float] = field(default_factory=list)  # gradient norms of the last updates, oldest first
    losses: list[float] = field(default_factory=list)  # mean losses of the same steps
    validation: ValidationProgress = field(default_factory=ValidationProgress)

    def counters(self) -> dict[str, Any]:
        """Counters for the manifest of a checkpoint, as plain JSON values."""
        return {name: getattr(self, name) for name in _COUNTERS} | {"validation": asdict(self.validation)}

    def restore(self, counters: dict[str, Any]) -> None:
        """Restore the counters of a manifest; counters missing in an older manifest are unchanged."""
        self.placeholders = None
        for name in _COUNTERS & counters.keys():
            setattr(self, name, counters[name])
        self.validation = ValidationProgress.of_manifest(counters)
