# SPDX-License-Identifier: Apache-2.0
"""Results of a demo run: frozen dataclasses, filled by outcome.py and read by report.py.

Comes after every stage of the demo, before the report. Only `Timing` and `Machine` depend on the machine or the clock;
everything else is equal for two runs with one seed. Scores are shares from 0 to 1.
Source of the table and the search: the paper's Table 6 and Figure 4.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One logged step of training."""

    step: int
    loss: float  # mean over loss tokens
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Packing efficiency of one stage, and the distribution of visual tokens over its packed sequences."""

    num_packs: int
    num_samples: int
    efficiency: float  # share of positions that are not padding
    visual_tokens_mean: float  # per pack
    visual_tokens_max: float
    visual_tokens_cv: float  # standard deviation over mean


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the demo, in the order in which they ran; stages that do not train have no curve."""

    name: str  # key into Timing, such as "sft-256"
    title: str  # such as "SFT, 256 tokens"
    does: str  # short description of what it trains or writes
    command: str = ""  # mindvl commands of the stage; empty if there is none
    recipe: str = ""  # YAML text of its recipe, empty for stages that do not train
    curve: tuple[CurvePoint, ...] = ()
    packing: Packing | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """A column of the score table."""

    name: str
    title: str
    num_items: int  # test items


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A model and its scores, one for each task, in the order of the columns."""

    model: str
    role: Literal["parent", "merged"]
    scores: tuple[float, ...]

    @property
    def overall(self) -> float:
        """Mean over the tasks, as in the paper."""
        return sum(self.scores) / len(self.scores)


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    """Test scores of the SFT models and of their average."""

    tasks: tuple[Task, ...]
    rows: tuple[TableRow, ...]


@dataclass(frozen=True, kw_only=True)
class GridScores:
    """Validation scores of one model over the grid: `scores[i][j]` for `min_pixels[i]`, `max_pixels[j]`."""

    model: str
    role: Literal["parent", "merged"]
    scores: tuple[tuple[float | None, ...], ...]  # None where the minimum is above the maximum


@dataclass(frozen=True, kw_only=True)
class ResolutionSearch:
    """The search for the test-time image size limits: all models over one grid, one choice for the merged model."""

    min_pixels: tuple[int, ...]
    max_pixels: tuple[int, ...]
    models: tuple[GridScores, ...]
    chosen_min_pixels: int
    chosen_max_pixels: int
    validation_score: float  # of the merged model with the chosen limits
    test_score: float  # the same on the test split, measured once
    num_validation_items: int


@dataclass(frozen=True, kw_only=True)
class Example:
    """A test item answered by the merged model; chosen by position, never by whether the answer is right."""

    task: str  # Task.name
    images: tuple[Path, ...]
    question: str
    answer: str
    truth: str
    is_right: bool


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The main result: share of unseen three-digit numbers read exactly by the merged model."""

    title: str
    score: float
    num_items: int
    wanted: float  # documented score of a full run


@dataclass(frozen=True, kw_only=True)
class StageTiming:
    """Seconds of a stage, without interrupted attempts, and its training speed."""

    stage: str  # Stage.name
    seconds: float
    tokens_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Results that depend on the clock."""

    stages: tuple[StageTiming, ...]

    @property
    def total_s(self) -> float:
        """Seconds of all stages together, without interrupted attempts."""
        return sum(stage.seconds for stage in self.stages)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Results that depend on the machine."""

    device: str  # such as "CPU" or "NVIDIA H100"
    num_cores: int  # cores this process may use
    memory_gib: float
    platform: str
    versions: dict[str, str]  # name of the library -> version
    finished_at: str = ""  # ISO 8601, empty when unknown


@dataclass(frozen=True, kw_only=True)
class Results:
    """All results of a demo."""

    seed: int
    is_quick: bool
    commit: str  # empty outside a git checkout
    headline: Headline
    stages: tuple[Stage, ...]
    table: ScoreTable
    search: ResolutionSearch
    examples: tuple[Example, ...]
    timing: Timing
    machine: Machine
