# SPDX-License-Identifier: Apache-2.0
"""What can stop a training run; every message says what, where and what to do."""


class TrainError(Exception):
    """A run that cannot start or go on."""


class CheckpointError(TrainError):
    """A checkpoint that is missing, damaged, or belongs to another run."""
