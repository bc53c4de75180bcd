# SPDX-License-Identifier: Apache-2.0
"""The seconds of a step on all ranks -> computation and waiting time by cause; the parts add up to the step.

Comes after step_clock.py on every rank, before the report; docs/reference/metrics.md derives the formulas. All ranks end a
step together, so each waits for the slowest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindvl_train.metrics.step_clock import PHASES, Phase

# Phases of own work, without waiting for other ranks.
_BUSY: tuple[Phase, ...] = ("data", "vision", "language", "optimizer", "host")


@dataclass(frozen=True, kw_only=True)
class StepSplit:
    """Seconds of one step, averaged over ranks; the fields add up to the step."""

    vision: float  # vision encoder and projector, forward and backward
    language: float  # all other parts of the model, forward and backward
    data_wait: float  # waiting for packs of this rank or of the slowest rank
    vision_imbalance: float  # waiting for ranks with more images
    language_imbalance: float  # waiting for ranks with more work of the language model
    pipeline_bubble: float  # waiting for other stages, without imbalance
    exposed_communication: float  # other time in collectives
    optimizer: float
    host: float  # everything else

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class RankTime:
    """Step times of one rank."""

    dp_rank: int
    pp_rank: int
    seconds: dict[Phase, float]


def split_step(ranks: Sequence[RankTime]) -> StepSplit:
    """Attribute the waiting time of all ranks to its causes.

    The slowest position (data-parallel rank and stage) is that with the most own work. Its excess over the mean is
    divided among the phases in which it occurred; other ranks waited that long, for stages of the same pipeline or for
    other pipelines. The remaining time waiting for stages is the bubble, other remaining waiting is exposed communication.
    """
    table = np.array([[rank.seconds[name] for name in PHASES] for rank in ranks])
    mean = dict(zip(PHASES, table.mean(axis=0).tolist(), strict=True))
    positions = sorted({(rank.dp_rank, rank.pp_rank) for rank in ranks})
    # Average over tensor- and context-parallel ranks, which do the same work.
    own = np.array([[rank.dp_rank, rank.pp_rank] for rank in ranks])
    by_position = np.stack([table[(own == position).all(axis=1)].mean(axis=0) for position in positions])
    busy = by_position[:, [PHASES.index(name) for name in _BUSY]]  # [positions, phases]
    by_stage, by_pipeline = _excess(busy.sum(axis=1), np.array(positions))
    by_stage, by_pipeline = min(by_stage, mean["pipeline"]), min(by_pipeline, mean["communication"])
    more = np.maximum(busy[busy.sum(axis=1).argmax()] - busy.mean(axis=0), 0.0)
    weights = more / more.sum() if more.sum() > 0 else more
    caused = dict(zip(_BUSY, ((by_stage + by_pipeline) * weights).tolist(), strict=True))
    unexplained = (by_stage + by_pipeline) * (1.0 - float(weights.sum()))
    return StepSplit(
        vision=mean["vision"],
        language=mean["language"],
        data_wait=mean["data"] + caused["data"],
        vision_imbalance=caused["vision"],
        language_imbalance=caused["language"],
        pipeline_bubble=mean["pipeline"] - by_stage,
        exposed_communication=mean["communication"] - by_pipeline + unexplained,
        optimizer=mean["optimizer"] + caused["optimizer"],
        host=mean["host"] + caused["host"],
    )


def _excess(work: NDArray[np.float64], positions: NDArray[np.int64]) -> tuple[float, float]:
    """Excess work of the slowest stage over the mean stage, and of the slowest pipeline over the mean pipeline."""
    slowest_stages = np.array([work[positions[:, 0] == dp_rank].max() for dp_rank in np.unique(positions[:, 0])])
    return float(slowest_stages.mean() - work.mean()), float(slowest_stages.max() - slowest_stages.mean())
