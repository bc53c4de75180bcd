# SPDX-License-Identifier: Apache-2.0
"""A plan: several runs in order, each from the weights of an earlier one, as the paper's three phases are.

Comes before run.py, which carries out one run after the other. What has finished is known from the checkpoints alone,
so a plan that was stopped goes on wherever it is started again.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindvl_train.checkpoints.directory import complete_checkpoints, plain_json, read_manifest
from mindvl_train.config import RunConfig
from mindvl_train.errors import DamagedCheckpointError, TrainError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

# What may change after a stage has finished, because its weights would be the same: how it was spread, watched and fed.
_FREE = (
    *("out", "checkpoints", "metrics", "parallel", "recompute", "faults", "ops", "optimizer.offload"),
    *(
        "data.num_threads",
        "data.prefetch_packs",
        "data.prefetch_bytes",
        "data.order_ahead_steps",
        "data.max_failed_share",
    ),
    *("data.store", "data.audit_log", "data.quarantine_log"),
)


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One run of a plan."""

    name: str  # of its directory below the plan's `out`
    recipe: Path  # of the run; a relative path starts at the directory of the plan
    start_from: str | None = None  # an earlier stage, whose last weights replace the recipe's `init`
    overrides: tuple[str, ...] = ()  # KEY=VALUE for the recipe, as on the command line

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name={self.name!r} is no name of a directory. Use letters, digits, dots and dashes.")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Runs in order; each gets its directory below `out`."""

    out: Path  # directory of all stages
    stages: tuple[StageConfig, ...]  # in the order they run
    overrides: tuple[str, ...] = ()  # KEY=VALUE for the recipe of every stage, before the stage's own

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("stages is empty. Name at least one.")
        before: list[str] = []
        for stage in self.stages:
            if stage.name in before:
                raise ValueError(f"two stages are called {stage.name!r}. Give each its own name.")
            if stage.start_from is not None and stage.start_from not in before:
                known = f"Use one of {', '.join(before)}." if before else "It is the first: leave start_from out."
                raise ValueError(
                    f"start_from={stage.start_from!r} of stage {stage.name!r} is no earlier stage. {known}"
                )
            before.append(stage.name)

    def place_of(self, stage: StageConfig) -> list[str]:
        """KEY=VALUE for where a stage stands and starts; nothing else may change it."""
        place = [f"out={self.out / stage.name}"]
        if stage.start_from is not None:
            place.append(f"init={{checkpoint: {str(self.out / stage.start_from)!r}}}")
        return place


@dataclass(frozen=True)
class Stage:
    """One run of a plan, with its recipe read."""

    name: str
    start_from: str | None
    config: RunConfig


def finished_stages(stages: Sequence[Stage], *, data_may_differ: bool = False) -> list[str]:
    """Names of the stages that have reached the end of their schedule; the others are to be run, in order.

    Args:
        data_may_differ: Whether somebody accepts that the data section changed since.

    Raises:
        TrainError: A stage finished with another recipe than the plan has now, or before the one it starts from.
    """
    finished: list[str] = []
    for stage in stages:
        found = complete_checkpoints(stage.config.out / "checkpoints")
        if not found:
            continue
        try:
            manifest = read_manifest(found[-1])
        except DamagedCheckpointError as error:  # the run goes back to an older checkpoint, or refuses
            logger.warning("DAMAGED: %s. Stage %r does not count as finished.", error.damage, stage.name)
            continue
        then: dict[str, Any] = manifest["run"]
        if manifest["step"] < then["schedule"]["steps"]:
            continue
        again = f"To train it again, name another `out` for the plan, or remove {stage.config.out}"
        differing = sorted(_differences(then, plain_json(stage.config)))
        if data_may_differ:
            differing = [line for line in differing if not line.startswith("data.")]
        if differing:
            raise TrainError(
                f"{stage.config.out}: stage {stage.name!r} has finished with other settings than the plan has now: "
                f"{'; '.join(differing)}. Set them back. {again} and what was started from it."
            )
        if stage.start_from is not None and stage.start_from not in finished:
            raise TrainError(
                f"{stage.config.out}: stage {stage.name!r} has finished, but {stage.start_from!r}, which it starts "
                f"from, has not. Put that one's checkpoints back. {again}."
            )
        finished.append(stage.name)
    return finished


def _differences(then: Any, now: Any, path: str = "") -> Iterator[str]:
    """Dotted names of what decides the weights and differs, with both values."""
    if path in _FREE:
        return
    if isinstance(then, dict) and isinstance(now, dict):
        for key in then.keys() & now.keys():  # a setting that only one version of the program knows has its default
            yield from _differences(then[key], now[key], f"{path}.{key}" if path else key)
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for place, (one, other) in enumerate(zip(then, now, strict=True)):
            yield from _differences(one, other, f"{path}.{place}")
    elif path == "init.checkpoint" and then is not None and now is not None:
        if Path(then).name != Path(now).name:  # the directory of the whole plan may have moved
            yield f"{path} was {then}, is {now}"
    elif then != now:
        yield f"{path} was {then}, is {now}"
