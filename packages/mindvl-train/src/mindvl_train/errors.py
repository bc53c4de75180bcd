# SPDX-License-Identifier: Apache-2.0
"""Errors of mindvl_train. Every message names the place, the problem and the remedy."""


class TrainError(Exception):
    """A run cannot start or continue."""


class CheckpointError(TrainError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class ProcessError(TrainError):
    """A process of a run failed; its own message names the error."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is damaged; an older one may be intact.

    Args:
        damage: Path and problem.
    """

    def __init__(self, damage: str) -> None:
        super().__init__(f"{damage}. Use an older checkpoint (--resume PATH, or init.checkpoint).")
        self.damage = damage
