# SPDX-License-Identifier: Apache-2.0
"""What changes while training and must survive a stop: everything a checkpoint restores."""

from dataclasses import dataclass
from typing import Any

import torch

from mindvl_train.interfaces import BatchSource


@dataclass
class TrainState:
    """Model, optimizer, data and counters of a run.

    No random state: no layer draws numbers during a step, and the data plan is a function of its seed.
    """

    models: list[torch.nn.Module]  # chunks of the model on this pipeline stage, wrapped in gradient buffers
    optimizer: Any
    source: BatchSource
    step: int = 0  # finished updates
    label_tokens: int = 0  # learned tokens so far, over all ranks
    tokens: int = 0  # tokens so far, over all ranks, padding included
