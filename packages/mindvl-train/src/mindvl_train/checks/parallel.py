# SPDX-License-Identifier: Apache-2.0
"""Train the same steps in several parallel layouts and compare with one process: losses, gradients, routers, counts.

Each layout is a separate run of run.py in its own processes; runs.py compares metrics and checkpoints of two runs. The
main function is one rank: `python -m mindvl_train.checks.parallel JOB`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindvl_model.parallel_config import ParallelConfig
from mindvl_train.checks.jobs import apart, run_job, run_rank
from mindvl_train.checks.runs import Column, Difference, Differences, compare, worst
from mindvl_train.checks.windows import note_without_windows
from mindvl_train.config import CheckpointConfig, MetricsConfig, Precision, RunConfig
from mindvl_train.errors import TrainError
from mindvl_train.resolved_run import min_processes, resolve_run

_SIZES = {"tp": "tp_size", "pp": "pp_size", "vpp": "virtual_stages", "cp": "cp_size", "ep": "ep_size"}
_WORD = re.compile(r"(tp|pp|vpp|cp|ep|dp)(\d+)")
_EXACT = "one in fp32"  # reference for the rounding noise of bf16


@dataclass(frozen=True, kw_only=True)
class LayoutReport:
    """Differences between a parallel layout and one process."""

    layout: str
    processes: int
    steps: int
    differences: Mapping[Column, Difference] = field(default_factory=dict)  # worst of each column over all steps
    problem: str = ""  # error that prevented the comparison
    note: str = ""  # limits of the data

    @property
    def holds(self) -> bool:
        """Whether all differences are within their bounds."""
        compared = {"loss", "grad_norm", "gradient"} <= self.differences.keys()
        return compared and not self.problem and all(one.holds for one in self.differences.values())

    @property
    def worst(self) -> Difference:
        """The difference of all columns that is largest relative to its bound."""
        return max(self.differences.values(), key=lambda one: one.value / one.bound)


def parse_layout(name: str) -> tuple[ParallelConfig, int | None]:
    """Parse a layout name such as "tp2pp2", "pp2vpp2", "ep2" or "one"; returns it with its data-parallel size, if given.

    Raises:
        TrainError: The name or the combination of sizes is invalid.
    """
    words = [] if name == "one" else _WORD.findall(name)
    if name != "one" and (not words or "".join(word + size for word, size in words) != name):
        raise TrainError(
            f"--layouts: {name!r} is not a layout name. Use for example tp2, tp2pp2, pp2vpp2, cp2, ep2 or dp2."
        )
    sizes = {word: int(size) for word, size in words}
    try:
        named: dict[str, Any] = {_SIZES[word]: size for word, size in sizes.items() if word in _SIZES}
        parallel = ParallelConfig(**named)
    except ValueError as error:
        raise TrainError(f"--layouts: {name!r}: {error}") from None
    return parallel, sizes.get("dp")


def usual_layouts(config: RunConfig) -> list[str]:
    """The layouts of two processes that the model supports."""
    possible = []
    for name in ("dp2", "tp2", "pp2", "cp2", "ep2"):
        try:
            in_layout(config, name)
        except TrainError:
            continue
        possible.append(name)
    return possible


def in_layout(config: RunConfig, name: str) -> tuple[RunConfig, int]:
    """The run in another parallel layout, and its number of processes.

    Raises:
        TrainError: The layout does not fit the model or the global batch size.
    """
    parallel, dp_size = parse_layout(name)
    kept = config.parallel
    run = replace(
        config,
        parallel=replace(
            parallel,
            overlap=kept.overlap,
            spread_images=kept.spread_images,
            expert_capacity_factor=kept.expert_capacity_factor,
        ),
    )
    processes = min_processes(parallel) if dp_size is None else parallel.model_parallel_size * dp_size
    try:
        resolve_run(run, processes)
    except TrainError as error:
        raise TrainError(f"--layouts: {name!r}: {error}") from None
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
        directory: Empty directory for all runs.
        num_cores: Number of cores for the processes of a run.
        precision: Precision of weights and activations. In bf16 an additional run, in one process and fp32, measures
            the rounding noise that bounds the differences.
        on_layout: Called with the name of each run before it starts; reference runs are first.

    Raises:
        TrainError: A layout does not fit, or a run in one process failed.
    """
    short = _short(config, steps, precision)
    runs = {name: in_layout(short, name) for name in ("one", *layouts)}  # all layouts are checked before the first run
    note = note_without_windows(short, num_packs=steps * short.global_batch_size)

    def train(name: str, run: RunConfig, processes: int) -> Path:
        on_layout(name)
        job_directory = directory / name.replace(" ", "-")
        task = replace(run, out=job_directory / "run")
        run_job("mindvl_train.checks.parallel", task, job_directory, processes=processes, num_cores=num_cores)
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
    """Number of runs of check_parallel."""
    return len(layouts) + (1 if precision == "fp32" else 2)


def _train_one(
    run: RunConfig, precision: Precision, train: Callable[[str, RunConfig, int], Path], steps: int
) -> tuple[Path, Differences | None]:
    """The run in one process, and in bf16 its differences from fp32."""
    try:
        one = train("one", run, 1)
        exact = None if precision == "fp32" else train(_EXACT, replace(run, precision="fp32"), 1)
    except TrainError as error:
        raise TrainError(f"one process: {error}") from None
    return one, None if exact is None else compare(exact, one, steps)


def _short(config: RunConfig, steps: int, precision: Precision) -> RunConfig:
    """The same training for a few steps without warm-up, with a checkpoint after each step."""
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
    run_rank(_train)
