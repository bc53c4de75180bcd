# SPDX-License-Identifier: Apache-2.0
"""The seconds of a step on all ranks -> what it was spent on and what was lost, in parts that add up to the step.

Comes after step_clock.py on every rank, before the report; docs/reference/metrics.md derives the formulas. All ranks end a step
together, so what one of them waits is what others made it wait for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindvl_train.metrics.step_clock import PHASES, Phase

# What a rank does itself, as against waiting for others.
_BUSY: tuple[Phase, ...] = ("data", "vision", "language", "optimizer", "host")


@dataclass(frozen=True, kw_only=True)
class StepSplit:
    """Seconds of one step, averaged over ranks; all fields together are the step."""

    vision: float  # vision encoder and projector, forward and backward, the mean over ranks
    language: float  # likewise; with everything of the model that is not vision
    data_wait: float  # for packs, and for the slowest rank's packs
    vision_imbalance: float  # waiting because the slowest rank had more images
    language_imbalance: float  # waiting because the slowest rank had more of the language model's work
    pipeline_bubble: float  # waiting for other stages, but for their being slower
    exposed_communication: float  # all other time in collectives
    optimizer: float
    host: float  # everything without a name of its own

    @property
    def total(self) -> float:
        """Of the step."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class RankTime:
    """One rank's step."""

    dp_rank: int
    pp_rank: int
    seconds: dict[Phase, float]


def split_step(ranks: Sequence[RankTime]) -> StepSplit:
    """Put the waiting of all ranks down to what caused it.

    The slowest position (data-parallel rank and stage) is found by its own work. What it worked more than the mean is
    shared among the phases in which it did; the others waited that long, for other stages of its pipeline or for other
    pipelines. What is left of waiting for stages is the bubble, of other waiting exposed communication.
    """
    table = np.array([[rank.seconds[name] for name in PHASES] for rank in ranks])
    mean = dict(zip(PHASES, table.mean(axis=0).tolist(), strict=True))
    places = sorted({(rank.dp_rank, rank.pp_rank) for rank in ranks})
    # Tensor- and context-parallel peers do the same work; between them noise alone differs.
    own = np.array([[rank.dp_rank, rank.pp_rank] for rank in ranks])
    by_place = np.stack([table[(own == place).all(axis=1)].mean(axis=0) for place in places])
    busy = by_place[:, [PHASES.index(name) for name in _BUSY]]  # [places, phases]
    by_stage, by_pipeline = _excess(busy.sum(axis=1), np.array(places))
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


def _excess(work: NDArray[np.float64], places: NDArray[np.int64]) -> tuple[float, float]:
    """How much longer the slowest stage works than the mean one, and the slowest pipeline than the mean pipeline."""
    slowest_stages = np.array([work[places[:, 0] == dp_rank].max() for dp_rank in np.unique(places[:, 0])])
    return float(slowest_stages.mean() - work.mean()), float(slowest_stages.max() - slowest_stages.mean())
