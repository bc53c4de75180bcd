# SPDX-License-Identifier: Apache-2.0
"""Compare two runs of the same steps: all metrics and tensors that must not depend on the parallel layout.

Reads `metrics.jsonl` and the checkpoint of step 1 of both runs; parallel.py trains them.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from mindvl_train.checks.bounds import bound_of
from mindvl_train.metrics.sinks import flat, read_metrics

Column = Literal["loss", "grad_norm", "gradient", "router", "figures"]
COLUMNS: tuple[Column, ...] = get_args(Column)
SMALL = 1e-4  # fraction of the largest gradient below which values are dominated by rounding errors
_MOMENT = "optimizer.state.exp_avg."  # after one step: gradient * (1 - beta1)
_FIGURES = (  # besides loss, norm and routers; times, memory and load balance depend on the layout
    "loss_tokens",
    "tokens",
    "learning_rate",
    "skipped_steps",
    "since_last",
    "tokens_by_source",
    "loss_by_source",
    "loss_by_modality",
    "mtp_loss",
)


@dataclass(frozen=True)
class Difference:
    """The quantity of a column that is largest relative to its bound."""

    name: str  # such as "routers/load/2" or the name of a parameter
    value: float  # relative difference
    bound: float

    @property
    def holds(self) -> bool:
        """Whether it is within its bound; false for NaN."""
        return self.value <= self.bound


Differences = dict[Column, dict[str, float]]  # largest relative difference of all steps by name of the quantity


def compare(one: Path, other: Path, steps: int) -> Differences:
    """Differences of two run directories; the first one is the reference."""
    found: Differences = {column: {} for column in COLUMNS}
    lines = [read_metrics(run / "metrics.jsonl")[:steps] for run in (one, other)]
    for reference, line in zip(*lines, strict=True):
        expected, actual = _figures(reference), _figures(line)
        for name in expected.keys() | actual.keys():
            column = found[_column(name)]
            difference = relative(actual.get(name), expected.get(name))
            column[name] = max(column.get(name, 0.0), difference)
    found["gradient"] = gradient_differences(_first(one), _first(other))
    return found


def worst(found: Differences, noise: Differences | None = None) -> dict[Column, Difference]:
    """The worst difference of each column, without empty columns.

    Args:
        noise: Differences between one process in bf16 and one in fp32; None: the check runs in fp32.
    """
    return {
        column: worst_of(values, None if noise is None else noise[column]) for column, values in found.items() if values
    }


def worst_of(values: Mapping[str, float], noise: Mapping[str, float] | None = None) -> Difference:
    """The difference that is largest relative to its bound."""
    differences = [
        Difference(name, value, bound_of(None if noise is None else _finite(noise.get(name, 0.0))))
        for name, value in values.items()
    ]
    return max(differences, key=lambda one: one.value / one.bound)


def gradient_differences(expected: Path, actual: Path) -> dict[str, float]:
    """Largest difference of an element of each parameter's gradient, relative to the largest element.

    Args:
        expected, actual: Checkpoints of step 1, of any layout. Balancing biases of routers are included.
    """
    reference, other = _Gradients(expected), _Gradients(actual)
    if reference.shapes != other.shapes:  # a tensor is missing or incomplete
        return dict.fromkeys(sorted(key for key, _ in reference.shapes.items() ^ other.shapes.items()), math.inf)
    floor = SMALL * max(float(tensor.abs().max()) for key in reference.shapes for _, tensor in reference.read(key))
    found = {}
    for key in sorted(reference.shapes):
        try:
            pairs = zip(reference.read(key), other.read(key), strict=True)
        except ValueError:  # the tensor is incomplete: the layout does not save all trained parameters
            found[key.removeprefix(_MOMENT)] = math.inf
            continue
        for (name, tensor), (_, compared) in pairs:
            difference = float((tensor - compared).abs().max()) / max(float(tensor.abs().max()), floor)
            found[name] = math.inf if math.isnan(difference) else difference
    return found


def relative(actual: Any, expected: Any) -> float:
    """Relative difference of two numbers; infinite for different integers and for a missing value."""
    if actual is None or expected is None:
        return math.inf
    if isinstance(actual, int) and isinstance(expected, int):
        return 0.0 if actual == expected else math.inf
    difference = abs(actual - expected) / max(abs(expected), 1e-30)
    return math.inf if math.isnan(difference) else difference


def _figures(line: dict[str, Any]) -> dict[str, Any]:
    """The compared metrics of one line by name, in groups as group/name."""
    kept = {name: line[name] for name in ("loss", "grad_norm", "routers", *_FIGURES) if name in line}
    return flat(kept)


def _column(name: str) -> Column:
    if name.startswith("routers/"):
        return "router"
    return "loss" if name == "loss" else "grad_norm" if name == "grad_norm" else "figures"


def _finite(noise: float) -> float:
    """Noise, or 0 if it is not finite, such as for a changed count."""
    return noise if math.isfinite(noise) else 0.0


def _first(run: Path) -> Path:
    return run / "checkpoints" / "step-00000001"


class _Gradients:
    """First moments in a checkpoint, one tensor at a time; stacked layers are split."""

    def __init__(self, checkpoint: Path) -> None:
        from mindvl_train.megatron.tensor_files import TensorReader  # imports megatron-core

        self._reader = TensorReader(checkpoint / "tensors")
        self.shapes = {
            key: tuple(stored.shape)
            for key, stored in self._reader.tensors.items()
            if key.startswith(_MOMENT) or key.endswith("expert_bias")
        }

    def read(self, key: str) -> list[tuple[str, Tensor]]:
        """Read a stored tensor and split it into layers.

        Raises:
            ValueError: The tensor is incomplete.
        """
        name, tensor = key.removeprefix(_MOMENT), self._reader.read_tensor(key).float()
        if ".layers." not in name or re.search(r"\.layers\.\d", name):
            return [(name, tensor)]
        return [(name.replace(".layers.", f".layers.{layer}.", 1), piece) for layer, piece in enumerate(tensor)]
