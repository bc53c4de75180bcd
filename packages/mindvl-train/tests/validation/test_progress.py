# SPDX-License-Identifier: Apache-2.0
"""Which step is the best one, when the patience is over, and which step is validated; values worked out by hand."""

import math
from typing import Any

import pytest

from mindvl_data import SourceConfig
from mindvl_train.validation.config import ValidationConfig
from mindvl_train.validation.progress import ValidationProgress, has_ended, is_due, is_patience_over


def after(losses: list[float], **settings: Any) -> ValidationProgress:
    config = ValidationConfig(sources=(SourceConfig(name="pages", path="x"),), **settings)
    progress = ValidationProgress()
    for step, loss in enumerate(losses, start=1):
        progress = progress.after(step, loss, config)
    return progress


@pytest.mark.parametrize(
    ("losses", "min_delta", "best", "waited"),
    [
        ([3.0], 0.0, 1, 0),
        ([3.0, 2.0, 2.5, 2.0], 0.0, 2, 2),  # an equal loss is not lower
        ([3.0, 2.95, 2.9, 2.85], 0.1, 4, 0),  # 2.85 is lower than 3.0 by more than 0.1; 2.9 is not
        ([3.0, 2.95, 2.92, 2.91], 0.1, 4, 3),
        ([math.nan, 3.0], 0.0, 2, 0),
        ([3.0, math.nan, math.inf], 0.0, 1, 2),
    ],
)
def test_the_best_step_and_the_wait_follow_from_the_losses(
    losses: list[float], min_delta: float, best: int, waited: int
) -> None:
    progress = after(losses, min_delta=min_delta)
    assert (progress.step, progress.best_step, progress.waited) == (len(losses), best, waited)
    assert is_patience_over(waited, progress)
    assert not is_patience_over(waited + 1, progress)
    assert not is_patience_over(None, progress)


@pytest.mark.parametrize(
    ("step", "validated", "due"),
    [(0, 0, False), (4, 0, True), (4, 4, False), (5, 4, False), (8, 4, True), (10, 8, True), (10, 10, False)],
)
def test_steps_are_due_on_schedule_and_at_the_end(step: int, validated: int, due: bool) -> None:
    assert is_due(step, 10, 4, ValidationProgress(step=validated)) == due


def manifest(saved: int, validation: dict[str, Any] | None, **progress: Any) -> dict[str, Any]:
    run: dict[str, Any] = {"schedule": {"steps": 10}}
    if validation is not None:
        run["validation"] = {"every_steps": 4, "patience": None} | validation
    return {"step": saved, "run": run, "validation": progress}


@pytest.mark.parametrize(
    ("given", "ended"),
    [
        (manifest(10, None), True),
        (manifest(8, None), False),
        (manifest(10, {}, step=10), True),
        (manifest(10, {}, step=8), False),  # stopped in its last validation
        (manifest(8, {"patience": 2}, step=8, waited=2), True),
        (manifest(8, {"patience": 3}, step=8, waited=2), False),
        ({"step": 10, "run": {"schedule": {"steps": 10}}}, True),  # an older version
    ],
)
def test_a_checkpoint_tells_whether_its_run_has_ended(given: dict[str, Any], ended: bool) -> None:
    assert has_ended(given) == ended


def test_losses_of_other_samples_are_not_compared() -> None:
    progress = ValidationProgress(step=4, best_step=4, best_loss=1.0, data="a")
    assert progress.of_data("a") is progress
    assert progress.of_data("b") == ValidationProgress(data="b")


def test_a_manifest_of_a_newer_version_is_read() -> None:
    assert ValidationProgress.of_manifest({"validation": {"step": 3, "later": 1}}) == ValidationProgress(step=3)
