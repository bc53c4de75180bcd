# SPDX-License-Identifier: Apache-2.0
"""Train the same steps in several layouts and compare with one process: loss, gradient norm, gradients by parameter.

Each layout is a run of its own, by run.py and everything below it, in processes of its own; what is compared stands in
its metrics and checkpoints. As a program this file is one rank: `python -m mindvl_train.checks.parallel JOB`.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mindvl_train.checks.jobs import apart, be_one_rank, run_job
from mindvl_train.config import CheckpointConfig, MetricsConfig, ParallelConfig, RunConfig
from mindvl_train.errors import TrainError
from mindvl_train.layouts import data_parallel_size, fewest_processes
from mindvl_train.metrics.sinks import read_metrics

TOLERANCE = 1e-5  # relative, in fp32: sums in another order, nothing more
_SIZES = {"tp": "tp_size", "pp": "pp_size", "vpp": "virtual_stages", "cp": "cp_size", "ep": "ep_size"}
_WORD = re.compile(r"(tp|pp|vpp|cp|ep|dp)(\d+)")
_MOMENT = "optimizer.state.exp_avg."  # after one step it is the gradient times 1 - beta1
SMALL = 1e-4  # of the largest gradient of all: what is smaller is compared with this, as it is made of rounding


@dataclass(frozen=True, kw_only=True)
class LayoutReport:
    """How far one layout is from one process; relative differences, the largest of all steps."""

    layout: str
    processes: int
    steps: int
    loss: float = math.nan
    grad_norm: float = math.nan
    gradient: float = math.nan  # of the worst parameter in the first step, element by element
    parameter: str = ""  # the worst one
    problem: str = ""  # why there is nothing to compare

    @property
    def holds(self) -> bool:
        """Whether it is near enough."""
        return not self.problem and max(self.loss, self.grad_norm, self.gradient) <= TOLERANCE


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
        TrainError: The layout is not possible on this model or with these rows; the message says why.
    """
    parallel, dp_size = parse_layout(name)
    kept = config.parallel
    run = replace(config, parallel=replace(parallel, overlap=kept.overlap, spread_images=kept.spread_images))
    if parallel.ep_size > 1 and not hasattr(config.model.resolve().language, "num_experts"):
        raise TrainError(f"layout {name!r}: the model has no experts to spread. --layouts. Leave ep out.")
    processes = fewest_processes(run) if dp_size is None else parallel.model_parallel_size * dp_size
    try:
        data_parallel_size(run, processes)
    except TrainError as error:
        raise TrainError(f"layout {name!r}: {error}") from None
    return run, processes


def check_parallel(
    config: RunConfig,
    layouts: Sequence[str],
    folder: Path,
    *,
    steps: int,
    num_cores: int,
    on_layout: Callable[[str], None] = lambda name: None,
) -> list[LayoutReport]:
    """Train `steps` steps in one process and in each layout, in fp32, and compare.

    Args:
        folder: Of all runs; empty.
        num_cores: Shared by the processes of a run.
        on_layout: Told the name of each layout before it runs, "one" first.

    Raises:
        TrainError: A layout is not possible, or the run in one process fails.
    """
    short = _short(config, steps)
    runs = {name: in_layout(short, name) for name in ("one", *layouts)}  # all are found possible before any runs
    reports = []
    for name, (run, processes) in runs.items():
        on_layout(name)
        report = LayoutReport(layout=name, processes=processes, steps=steps)
        task = replace(run, out=folder / name / "run")
        try:
            run_job("mindvl_train.checks.parallel", task, folder / name, processes=processes, num_cores=num_cores)
        except TrainError as error:
            if name == "one":
                raise TrainError(f"one process: {error}") from None
            reports.append(replace(report, problem=str(error)))
            continue
        if name != "one":
            reports.append(compare_runs(folder / "one" / "run", task.out, report))
    return reports


def compare_runs(one: Path, other: Path, report: LayoutReport) -> LayoutReport:
    """The report with the differences of two run folders filled in."""
    lines = [read_metrics(folder / "metrics.jsonl")[: report.steps] for folder in (one, other)]
    loss, norm = (
        max(_relative(there[name], here[name]) for here, there in zip(*lines, strict=True))
        for name in ("loss", "grad_norm")
    )
    parameter, gradient = worst_gradient(_first(one), _first(other))
    return replace(report, loss=loss, grad_norm=norm, gradient=gradient, parameter=parameter)


def worst_gradient(expected: Path, actual: Path) -> tuple[str, float]:
    """Name and relative difference of the parameter whose gradients of one step differ most.

    Args:
        expected, actual: Checkpoints of step 1, in any layout. Balancing biases of routers count as parameters.
    """
    ours, theirs = _Gradients(expected), _Gradients(actual)
    if ours.names != theirs.names:
        return sorted(ours.names ^ theirs.names)[0], math.inf
    floor = SMALL * max(float(tensor.abs().max()) for _, tensor in ours.read())
    worst = ("", -1.0)
    for (name, tensor), (_, other) in zip(ours.read(), theirs.read(), strict=True):
        difference = float((tensor - other).abs().max()) / max(float(tensor.abs().max()), floor)
        worst = max(worst, (name, math.inf if math.isnan(difference) else difference), key=lambda one: one[1])
    return worst


class _Gradients:
    """First moments in a checkpoint, one tensor at a time; layers are stacked there and taken apart here."""

    def __init__(self, checkpoint: Path) -> None:
        from mindvl_train.megatron.tensor_files import TensorReader  # imports megatron-core

        self._reader = TensorReader(checkpoint / "tensors")
        self.names = {key for key in self._reader.tensors if key.startswith(_MOMENT) or key.endswith("expert_bias")}

    def read(self) -> Iterator[tuple[str, Tensor]]:
        for key in sorted(self.names):
            name, tensor = key.removeprefix(_MOMENT), self._reader.read_tensor(key).float()
            if ".layers." in name and not re.search(r"\.layers\.\d", name):
                for layer, piece in enumerate(tensor):
                    yield name.replace(".layers.", f".layers.{layer}.", 1), piece
            else:
                yield name, tensor


def _short(config: RunConfig, steps: int) -> RunConfig:
    """The same training, a few steps of it at full rate in fp32, with a checkpoint after each."""
    return replace(
        apart(config),
        precision="fp32",
        schedule=replace(config.schedule, steps=steps, lr_warmup_ratio=0.0),
        checkpoints=CheckpointConfig(every_steps=1, keep_last=steps),
        metrics=MetricsConfig(every_steps=1, tensorboard=False),
    )


def _first(run: Path) -> Path:
    return run / "checkpoints" / "step-00000001"


def _relative(actual: float, expected: float) -> float:
    difference = abs(actual - expected) / max(abs(expected), 1e-30)
    return math.inf if math.isnan(difference) else difference


def _train(config: RunConfig) -> None:
    from mindvl_train.run import run_training

    run_training(config)


if __name__ == "__main__":
    be_one_rank(_train)
