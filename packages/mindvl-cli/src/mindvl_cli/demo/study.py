# SPDX-License-Identifier: Apache-2.0
"""The study: SFT at three lengths over several seeds from one start, merged, searched and tested for each seed.

Uses the stages of pipeline.py; study_findings.py compares the models. Every seed has its own data order, validation items and
test items, so that the spread over seeds contains all three. Source of the questions: the paper's Table 6 and Figure 4.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mindvl_cli.demo.digits import Split
from mindvl_cli.demo.pipeline import DemoRun, merge, models, run_start, search, sft_phases, test, train
from mindvl_cli.demo.tasks import Task, write_benchmark

SEEDS = (1, 2, 3, 4, 5)
IMAGE_TASKS: tuple[Task, ...] = ("document", "read", "count", "compare")  # searched: only images have a resolution
TEST_TASKS: tuple[Task, ...] = (*IMAGE_TASKS, "arithmetic", "copy")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Validation scores of one pair of image size limits."""

    min_pixels: int
    max_pixels: int
    by_task: dict[str, float]

    @property
    def score(self) -> float:
        """Mean over the tasks."""
        return sum(self.by_task.values()) / len(self.by_task)


@dataclass(frozen=True, kw_only=True)
class ModelScores:
    """One model of one seed; scores are shares from 0 to 1."""

    model: str  # "sft-256" or "merged"
    test: dict[str, float]  # by task, with the limits that its own search chose
    chosen: tuple[int, int]  # min_pixels, max_pixels
    cells: tuple[Cell, ...]  # the resolution landscape

    @property
    def overall(self) -> float:
        """Mean over the tasks of the test."""
        return sum(self.test.values()) / len(self.test)


@dataclass(frozen=True, kw_only=True)
class SeedScores:
    """The models of one seed."""

    seed: int
    parents: tuple[ModelScores, ...]
    merged: ModelScores


def run_study(work: DemoRun, seeds: Sequence[int] = SEEDS) -> tuple[SeedScores, ...]:
    """Run every unfinished stage; the stages of one seed are finished before those of the next."""
    run_start(work, partial(_make_benchmarks, work, seeds))
    return tuple(_run_seed(replace(work, seed=seed)) for seed in seeds)


def _run_seed(work: DemoRun) -> SeedScores:
    stage, settings, seed = work.book.run, work.settings, work.seed
    start = {"checkpoint": work.run("multitask")}
    parents = []
    for name, phase in sft_phases(settings).items():
        parents.append(f"seed-{seed}-{name}")
        stage(parents[-1], partial(train, work, parents[-1], phase, start, phase_name="sft", export=True))
    merged = f"seed-{seed}-merged"
    stage(f"merge-{merged}", partial(merge, work, parents, merged))
    found = []
    for kind, name in zip(models(settings), (*parents, merged), strict=True):
        searched = stage(f"search-{name}", partial(search, work, name, f"validation-{seed}"))
        tested = stage(f"test-{name}", partial(test, work, name, searched["chosen"], f"test-{seed}"))
        cells = (
            Cell(min_pixels=one["min_pixels"], max_pixels=one["max_pixels"], by_task=one["by_task"])
            for one in searched["cells"]
        )
        found.append(
            ModelScores(
                model=kind,
                test={task: tested["by_task"][task]["score"] for task in TEST_TASKS},
                chosen=(searched["chosen"]["min_pixels"], searched["chosen"]["max_pixels"]),
                cells=tuple(cells),
            )
        )
    return SeedScores(seed=seed, parents=tuple(found[:-1]), merged=found[-1])


def _make_benchmarks(work: DemoRun, seeds: Sequence[int]) -> dict[str, Any]:
    settings = work.settings
    splits: tuple[tuple[Split, Sequence[Task], int], ...] = (
        ("validation", IMAGE_TASKS, settings.validation_items),
        ("test", TEST_TASKS, settings.test_items),
    )
    for seed in seeds:
        for number, (split, tasks, count) in enumerate(splits, start=500):
            directory = work.benchmarks(f"{split}-{seed}")
            shutil.rmtree(directory, ignore_errors=True)
            for task in tasks:
                write_benchmark(directory, task=task, split=split, num_samples=count, seed=seed * 1000 + number)
    return {}
