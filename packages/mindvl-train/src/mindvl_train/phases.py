# SPDX-License-Identifier: Apache-2.0
"""Pipeline file: training stages in order, each from the weights of an earlier one, such as the paper's three phases.

Comes before run.py, which runs one stage after the other. Finished stages are recognized by their checkpoints alone, so
a stopped pipeline resumes wherever it is started again.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindvl_train.checkpoints.best import BEST
from mindvl_train.checkpoints.directory import complete_checkpoints, plain_json, read_manifest
from mindvl_train.config import RunConfig
from mindvl_train.errors import DamagedCheckpointError, TrainError
from mindvl_train.validation.progress import has_ended

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

# Settings that may change after a stage has finished, because they do not affect its weights.
_FREE = (
    *("out", "checkpoints", "metrics", "parallel", "recompute", "faults", "ops", "optimizer.offload"),
    *(
        "data.num_threads",
        "data.prefetch_packs",
        "data.prefetch_bytes",
        "data.order_ahead_steps",
        "data.max_failed_share",
    ),
    *("data.store", "data.audit_log", "data.quarantine_log", "validation.generations"),
)


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One training stage of a pipeline file."""

    name: str  # name of the stage and of its directory below the `out` of the pipeline file
    recipe: Path  # recipe of the stage; relative paths start at the directory of the pipeline file
    start_from: str | None = None  # earlier stage, whose last or best checkpoint replaces the recipe's `init`
    # Checkpoint of `start_from`: the last one, or the one with the lowest validation loss.
    start_checkpoint: Literal["last", "best"] = "last"
    overrides: tuple[str, ...] = ()  # KEY=VALUE for the recipe, as on the command line

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name: must be a directory name, got {self.name!r}. Use letters, digits, dots and dashes."
            )
        if self.start_checkpoint == "best" and self.start_from is None:
            raise ValueError(
                "start_checkpoint: is best, but no stage is named in start_from. Name an earlier stage, or remove it."
            )


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """A pipeline file: training stages in order, each with its own directory below `out`."""

    out: Path  # directory of all stages
    stages: tuple[StageConfig, ...]  # in the order they run
    overrides: tuple[str, ...] = ()  # KEY=VALUE for the recipe of every stage, before the stage's own

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("stages: must have at least one stage.")
        before: list[str] = []
        for stage in self.stages:
            if stage.name in before:
                raise ValueError(f"stages: two stages have the name {stage.name!r}. Use unique names.")
            if stage.start_from is not None and stage.start_from not in before:
                known = f"Use one of {', '.join(before)}." if before else "Remove start_from from the first stage."
                raise ValueError(
                    f"stages: start_from={stage.start_from!r} of stage {stage.name!r} is not an earlier stage. {known}"
                )
            before.append(stage.name)

    def path_overrides(self, stage: StageConfig) -> list[str]:
        """KEY=VALUE overrides for the output directory and the initial checkpoint of a stage."""
        overrides = [f"out={self.out / stage.name}"]
        if stage.start_from is not None:
            start = self.out / stage.start_from
            start = start / "checkpoints" / BEST if stage.start_checkpoint == "best" else start
            overrides.append(f"init={{checkpoint: {str(start)!r}}}")
        return overrides


@dataclass(frozen=True)
class Stage:
    """One training stage with its loaded recipe."""

    name: str
    start_from: str | None
    config: RunConfig


def check_best(stages: Sequence[Stage]) -> None:
    """Check that a stage whose best checkpoint another one starts from has one.

    Raises:
        TrainError: Its recipe has no validation, or does not keep the best checkpoint.
    """
    by_name = {stage.name: stage.config for stage in stages}
    for stage in stages:
        named = stage.config.init.checkpoint
        if stage.start_from is None or named is None or named.name != BEST:
            continue
        before = by_name[stage.start_from]
        if before.validation is None or not before.checkpoints.keep_best:
            missing = "no validation section" if before.validation is None else "checkpoints.keep_best=false"
            raise TrainError(
                f"stages: stage {stage.name!r} starts from the best checkpoint of {stage.start_from!r}, whose recipe has "
                f"{missing}. Add it, or set start_checkpoint: last."
            )


def finished_stages(stages: Sequence[Stage], *, data_may_differ: bool = False) -> list[str]:
    """Names of the stages that have reached the end of their schedule.

    Args:
        data_may_differ: Whether a change of the data section is accepted.

    Raises:
        TrainError: A stage has finished with other settings, or before the stage it starts from.
    """
    finished: list[str] = []
    for stage in stages:
        found = complete_checkpoints(stage.config.out / "checkpoints")
        if not found:
            continue
        try:
            manifest = read_manifest(found[-1])
        except DamagedCheckpointError as error:  # the run resumes from an older checkpoint, or fails
            logger.warning("DAMAGED: %s. Stage %r is treated as not finished.", error.damage, stage.name)
            continue
        then: dict[str, Any] = manifest["run"]
        if not has_ended(manifest):
            continue
        again = f"To train it again, set another `out` in the pipeline file, or remove {stage.config.out}"
        differing = sorted(_differences(then, plain_json(stage.config)))
        if data_may_differ:
            differing = [line for line in differing if not line.startswith("data.")]
        if differing:
            raise TrainError(
                f"{stage.config.out}: stage {stage.name!r} has finished with other settings: {'; '.join(differing)}. "
                f"Restore these settings. {again} and the stages that start from it."
            )
        if stage.start_from is not None and stage.start_from not in finished:
            raise TrainError(
                f"{stage.config.out}: stage {stage.name!r} has finished, but stage {stage.start_from!r}, which it starts "
                f"from, has not. Restore the checkpoints of {stage.start_from!r}. {again}."
            )
        finished.append(stage.name)
    return finished


def _differences(then: Any, now: Any, path: str = "") -> Iterator[str]:
    """Settings that affect the weights and differ, with both values."""
    if path in _FREE:
        return
    if isinstance(then, dict) and isinstance(now, dict):
        # A key that only one of them has comes from another version, with its default.
        for key in then.keys() & now.keys():
            yield from _differences(then[key], now[key], f"{path}.{key}" if path else key)
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for index, (one, other) in enumerate(zip(then, now, strict=True)):
            yield from _differences(one, other, f"{path}.{index}")
    elif path == "init.checkpoint" and then is not None and now is not None:
        if _stage_of(then) != _stage_of(now):  # the directory of the pipeline may have been moved
            yield f"{path} was {then}, is {now}"
    elif then != now:
        yield f"{path} was {then}, is {now}"


def _stage_of(checkpoint: str) -> tuple[str, bool]:
    """The directory name of the stage in `init.checkpoint`, and whether its best checkpoint is meant."""
    path = Path(checkpoint)
    return (path.parent.parent.name, True) if path.name == BEST else (path.name, False)
