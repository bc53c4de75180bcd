# SPDX-License-Identifier: Apache-2.0
"""What can stop a training run; every message says what, where and what to do."""


class TrainError(Exception):
    """A run that cannot start or go on."""


class CheckpointError(TrainError):
    """A checkpoint that is missing, damaged, or belongs to another run."""


class ProcessError(TrainError):
    """A process of a run ended with an error; the message of that process says which."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is not as it was written; an older one may do.

    Args:
        damage: What is wrong, where.
    """

    def __init__(self, damage: str) -> None:
        super().__init__(f"{damage}. Name an older checkpoint (--resume PATH, or init.checkpoint).")
        self.damage = damage
