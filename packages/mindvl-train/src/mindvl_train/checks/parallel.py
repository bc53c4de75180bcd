# SPDX-License-Identifier: Apache-2.0
"""Train the same steps in several layouts and compare with one process: losses, gradients, routers, counts.

Each layout is a run of its own, by run.py and everything below it, in processes of its own; runs.py compares metrics
and checkpoints of two of them. As a program this file is one rank: `python -m mindvl_train.checks.parallel JOB`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindvl_model.parallel_config import ParallelConfig
from mindvl_train.checks.jobs import apart, be_one_rank, run_job
from mindvl_train.checks.runs import Column, Difference, Differences, compare, worst
from mindvl_train.checks.windows import note_without_windows
from mindvl_train.config import CheckpointConfig, MetricsConfig, Precision, RunConfig
from mindvl_train.errors import TrainError
from mindvl_train.resolved_run import min_processes, resolve_run

_SIZES = {"tp": "tp_size", "pp": "pp_size", "vpp": "virtual_stages", "cp": "cp_size", "ep": "ep_size"}
_WORD = re.compile(r"(tp|pp|vpp|cp|ep|dp)(\d+)")
_EXACT = "one in fp32"  # what bf16 is compared with to know its rounding noise


@dataclass(frozen=True, kw_only=True)
class LayoutReport:
    """How far one layout is from one process."""

    layout: str
    processes: int
    steps: int
    differences: Mapping[Column, Difference] = field(default_factory=dict)  # the worst of each column, over all steps
    problem: str = ""  # why there is nothing to compare
    note: str = ""  # what the data did not exercise

    @property
    def holds(self) -> bool:
        """Whether it is near enough."""
        compared = {"loss", "grad_norm", "gradient"} <= self.differences.keys()
        return compared and not self.problem and all(one.holds for one in self.differences.values())

    @property
    def worst(self) -> Difference:
        """Of all columns, what is furthest beyond its bound or nearest to it."""
        return max(self.differences.values(), key=lambda one: one.value / one.bound)


def parse_layout(name: str) -> tuple[ParallelConfig, int | None]:
    """A name such as "tp2pp2", "pp2vpp2", "ep2" or "one" as a layout, and its data-parallel size where it names one.

    Raises:
        TrainError: It is no such name, or its parts do not fit each other.
    """
    words = [] if name == "one" else _WORD.findall(name)
    if name != "one" and (not words or "".join(word + size for word, size in words) != name):
        raise TrainError(
            f"{name!r} is no layout. --layouts. Join sizes by their names, such as tp2, tp2pp2, pp2vpp2, cp2, ep2, dp2."
        )
    sizes = {word: int(size) for word, size in words}
    try:
        named: dict[str, Any] = {_SIZES[word]: size for word, size in sizes.items() if word in _SIZES}
        parallel = ParallelConfig(**named)
    except ValueError as error:
        raise TrainError(f"layout {name!r}: {error}") from None
    return parallel, sizes.get("dp")


def usual_layouts(config: RunConfig) -> list[str]:
    """Two processes in each way that is possible on the model."""
    possible = []
    for name in ("dp2", "tp2", "pp2", "cp2", "ep2"):
        try:
            in_layout(config, name)
        except TrainError:
            continue
        possible.append(name)
    return possible


def in_layout(config: RunConfig, name: str) -> tuple[RunConfig, int]:
    """The run in another layout, and the number of its processes.

    Raises:
        TrainError: The layout is not possible on this model or with these packs; the message says why.
    """
    parallel, dp_size = parse_layout(name)
    kept = config.parallel
    run = replace(config, parallel=replace(parallel, overlap=kept.overlap, spread_images=kept.spread_images))
    processes = min_processes(parallel) if dp_size is None else parallel.model_parallel_size * dp_size
    try:
        resolve_run(run, processes)
    except TrainError as error:
        raise TrainError(f"layout {name!r}: {error}") from None
    return run, processes


def check_parallel(
    config: RunConfig,
    layouts: Sequence[str],
    directory: Path,
    *,
    steps: int,
    num_cores: int,
    precision: Precision = "fp32",
    on_layout: Callable[[str], None] = lambda name: None,
) -> list[LayoutReport]:
    """Train `steps` steps in one process and in each layout, and compare.

    Args:
        directory: Of all runs; empty.
        num_cores: Shared by the processes of a run.
        precision: Of weights and activations. In bf16 one more run, in one process and fp32, measures the rounding
            noise that bounds the differences.
        on_layout: Told the name of each run before it starts; those that layouts are compared with come first.

    Raises:
        TrainError: A layout is not possible, or a run in one process fails.
    """
    short = _short(config, steps, precision)
    runs = {name: in_layout(short, name) for name in ("one", *layouts)}  # all are found possible before any runs
    note = note_without_windows(short, num_packs=steps * short.global_batch_size)

    def train(name: str, run: RunConfig, processes: int) -> Path:
        on_layout(name)
        place = directory / name.replace(" ", "-")
        task = replace(run, out=place / "run")
        run_job("mindvl_train.checks.parallel", task, place, processes=processes, num_cores=num_cores)
        return task.out

    one, noise = _train_one(runs.pop("one")[0], precision, train, steps)
    reports = []
    for name, (run, processes) in runs.items():
        report = LayoutReport(layout=name, processes=processes, steps=steps, note=note)
        try:
            other = train(name, run, processes)
        except TrainError as error:
            reports.append(replace(report, problem=str(error)))
            continue
        reports.append(replace(report, differences=worst(compare(one, other, steps), noise)))
    return reports


def num_runs(layouts: Sequence[str], precision: Precision) -> int:
    """How many runs check_parallel makes."""
    return len(layouts) + (1 if precision == "fp32" else 2)


def _train_one(
    run: RunConfig, precision: Precision, train: Callable[[str, RunConfig, int], Path], steps: int
) -> tuple[Path, Differences | None]:
    """The run in one process, and in bf16 how far it is from fp32."""
    try:
        one = train("one", run, 1)
        exact = None if precision == "fp32" else train(_EXACT, replace(run, precision="fp32"), 1)
    except TrainError as error:
        raise TrainError(f"one process: {error}") from None
    return one, None if exact is None else compare(exact, one, steps)


def _short(config: RunConfig, steps: int, precision: Precision) -> RunConfig:
    """The same training, a few steps of it at full rate, with a checkpoint after each."""
    return replace(
        apart(config),
        precision=precision,
        schedule=replace(config.schedule, steps=steps, lr_warmup_ratio=0.0),
        checkpoints=CheckpointConfig(every_steps=1, keep_last=steps),
        metrics=MetricsConfig(every_steps=1, tensorboard=False),
    )


def _train(config: RunConfig) -> None:
    from mindvl_train.run import run_training

    run_training(config)


if __name__ == "__main__":
    be_one_rank(_train)
