# SPDX-License-Identifier: Apache-2.0
"""The learning rate as a pure function of the step."""

import math

from mindvl_train.config import ScheduleConfig


def learning_rate(config: ScheduleConfig, step: int) -> float:
    """Learning rate of the update after `step` finished ones; step is in [0, steps - 1]."""
    warmup = round(config.steps * config.lr_warmup_ratio)
    if step < warmup:
        return config.peak_lr * (step + 1) / warmup
    progress = (step - warmup + 1) / max(1, config.steps - warmup)
    return config.min_lr + (config.peak_lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
