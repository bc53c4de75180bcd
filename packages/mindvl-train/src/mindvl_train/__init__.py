# SPDX-License-Identifier: Apache-2.0
"""Phases, loop, step, checkpoints and metrics: trains a MindVL model on any accelerator."""

from mindvl_train.config import (
    CheckpointConfig,
    InitSection,
    MetricsConfig,
    ModelSection,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from mindvl_train.errors import CheckpointError, ProcessError, TrainError
from mindvl_train.run import RunResult, run_training

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "InitSection",
    "MetricsConfig",
    "ModelSection",
    "OptimizerConfig",
    "ProcessError",
    "RunConfig",
    "RunResult",
    "ScheduleConfig",
    "TrainError",
    "run_training",
]
