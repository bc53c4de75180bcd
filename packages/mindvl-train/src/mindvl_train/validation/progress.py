# SPDX-License-Identifier: Apache-2.0
"""Progress of validation: the last validated step, the best one, and how long the loss has not decreased.

Part of the train state and of every manifest, so that a resumed run chooses the same checkpoint and ends at the same
step. Comes after a validation; loop.py, saving.py and phases.py ask it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mindvl_train.validation.config import ValidationConfig


@dataclass(frozen=True, kw_only=True)
class ValidationProgress:
    """What earlier validations found. A loss is the one that `validation.measure` names."""

    step: int = 0  # last validated step
    best_step: int | None = None  # step with the lowest loss
    best_loss: float | None = None
    patience_loss: float | None = None  # last loss that was lower by more than `min_delta`
    waited: int = 0  # validations since then
    data: str = ""  # digest of the samples and of the measure: losses of others are not compared

    def after(self, step: int, loss: float, config: ValidationConfig) -> "ValidationProgress":
        """The progress after the validation of a step; a loss that is not finite is never the best one."""
        now = replace(self, step=step)
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            now = replace(now, best_step=step, best_loss=loss)
        if math.isfinite(loss) and (self.patience_loss is None or loss < self.patience_loss - config.min_delta):
            return replace(now, patience_loss=loss, waited=0)
        return replace(now, waited=self.waited + 1)

    @classmethod
    def of_manifest(cls, manifest: Mapping[str, Any]) -> "ValidationProgress":
        """The progress in a manifest; that of a new run if an older version has written it."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in manifest.get("validation", {}).items() if name in known})

    def of_data(self, data: str) -> "ValidationProgress":
        """The same progress, or a new one if it belongs to other samples or to another measure."""
        return self if self.data == data else ValidationProgress(data=data)


def is_due(step: int, steps: int, every_steps: int, progress: ValidationProgress) -> bool:
    """Whether a step is to be validated and is not validated yet.

    Args:
        step: Finished steps.
        steps: Steps of the schedule.
    """
    return step > 0 and progress.step != step and (step % every_steps == 0 or step >= steps)


def is_patience_over(patience: int | None, progress: ValidationProgress) -> bool:
    """Whether the run ends because the loss has not decreased."""
    return patience is not None and progress.waited >= patience


def has_ended(manifest: Mapping[str, Any]) -> bool:
    """Whether the checkpoint with this manifest is the end of its run: of its schedule or of its patience."""
    step, steps = manifest["step"], manifest["run"]["schedule"]["steps"]
    config: Mapping[str, Any] | None = manifest["run"].get("validation")
    if config is None:
        return bool(step >= steps)
    progress = ValidationProgress.of_manifest(manifest)
    if is_patience_over(config["patience"], progress):
        return True
    return bool(step >= steps) and not is_due(step, steps, config["every_steps"], progress)
