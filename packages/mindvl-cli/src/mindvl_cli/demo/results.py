# SPDX-License-Identifier: Apache-2.0
"""What a demo run found: plain frozen dataclasses, filled by the demo's last stage and read by report.py.

Comes after every stage of the demo, before the report. What depends on the machine or the clock lives in `Timing` and
`Machine` alone; all else is equal for two runs with one seed. Scores are shares from 0 to 1.
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
    """How well one stage's rows were filled, and how evenly visual tokens were spread over them."""

    num_packs: int
    num_samples: int
    efficiency: float  # share of positions that are not padding
    visual_tokens_mean: float  # per row
    visual_tokens_max: float
    visual_tokens_cv: float  # standard deviation over mean


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the demo, in the order in which they ran; stages that do not train have no curve."""

    name: str  # key into Timing, such as "sft-256"
    title: str  # such as "SFT, 256 tokens"
    does: str  # half a sentence: what it trains or makes
    command: str = ""  # what a user types for it, empty when it is the demo's own work
    recipe: str = ""  # YAML text of what its training read, empty for stages that do not train
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
    validation_score: float  # of the merged model at the chosen setting
    test_score: float  # the same on the test split, taken once
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
    """The one figure the demo is asked for: unseen three-digit numbers read exactly by the merged model."""

    title: str
    score: float
    num_items: int
    wanted: float  # what the demo promises for a full run


@dataclass(frozen=True, kw_only=True)
class StageTiming:
    """Seconds of the start that finished a stage, not of starts that were cut off; its speed where it trains."""

    stage: str  # Stage.name
    seconds: float
    tokens_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Everything that the clock decides."""

    stages: tuple[StageTiming, ...]

    @property
    def total_s(self) -> float:
        """Seconds of all stages together, each from the start that finished it."""
        return sum(stage.seconds for stage in self.stages)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Everything that differs from one machine to the next."""

    device: str  # such as "CPU" or "NVIDIA H100"
    num_cores: int  # cores this process may use
    memory_gib: float
    platform: str
    versions: dict[str, str]  # name of the library -> version
    finished_at: str = ""  # ISO 8601, empty when unknown


@dataclass(frozen=True, kw_only=True)
class Results:
    """All of it."""

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
