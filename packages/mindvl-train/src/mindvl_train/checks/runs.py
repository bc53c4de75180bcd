# SPDX-License-Identifier: Apache-2.0
"""Compare two runs of the same steps: everything in metrics and checkpoint that a parallel layout must not change.

Comes after the runs, which leave `metrics.jsonl` and a checkpoint of step 1; parallel.py makes and judges them.
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
SMALL = 1e-4  # of the largest gradient of all: what is smaller is compared with this, as it is made of rounding
_MOMENT = "optimizer.state.exp_avg."  # after one step it is the gradient times 1 - beta1
_FIGURES = (  # besides loss, norm and routers; times, memory and load balance differ between layouts by nature
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
    """The worst of a column: the quantity that comes nearest to its bound, or lies furthest beyond it."""

    name: str  # such as "routers/load/2" or the name of a parameter
    value: float  # relative
    bound: float

    @property
    def holds(self) -> bool:
        """Whether it is within its bound; NaN is not."""
        return self.value <= self.bound


Differences = dict[Column, dict[str, float]]  # relative, by the name of the quantity, the largest of all steps


def compare(one: Path, other: Path, steps: int) -> Differences:
    """Differences of two run directories, the first of which is right."""
    found: Differences = {column: {} for column in COLUMNS}
    lines = [read_metrics(run / "metrics.jsonl")[:steps] for run in (one, other)]
    for here, there in zip(*lines, strict=True):
        expected, actual = _figures(here), _figures(there)
        for name in expected.keys() | actual.keys():
            column = found[_column(name)]
            difference = relative(actual.get(name), expected.get(name))
            column[name] = max(column.get(name, 0.0), difference)
    found["gradient"] = gradient_differences(_first(one), _first(other))
    return found


def worst(found: Differences, noise: Differences | None = None) -> dict[Column, Difference]:
    """The worst of each column; a column is left out where there is nothing to compare, such as routers.

    Args:
        noise: In bf16, the differences of one process to one process in fp32.
    """
    return {
        column: worst_of(values, None if noise is None else noise[column]) for column, values in found.items() if values
    }


def worst_of(values: Mapping[str, float], noise: Mapping[str, float] | None = None) -> Difference:
    """The difference that is largest relative to its bound."""
    judged = [
        Difference(name, value, bound_of(None if noise is None else _finite(noise.get(name, 0.0))))
        for name, value in values.items()
    ]
    return max(judged, key=lambda one: one.value / one.bound)


def gradient_differences(expected: Path, actual: Path) -> dict[str, float]:
    """Largest difference of an element of each parameter's gradient, relative to the largest element.

    Args:
        expected, actual: Checkpoints of step 1, in any layout. Balancing biases of routers count as parameters.
    """
    ours, theirs = _Gradients(expected), _Gradients(actual)
    if ours.shapes != theirs.shapes:  # a tensor is missing, or is not stored whole
        return dict.fromkeys(sorted(key for key, _ in ours.shapes.items() ^ theirs.shapes.items()), math.inf)
    floor = SMALL * max(float(tensor.abs().max()) for key in ours.shapes for _, tensor in ours.read(key))
    found = {}
    for key in sorted(ours.shapes):
        try:
            pairs = zip(ours.read(key), theirs.read(key), strict=True)
        except ValueError:  # the checkpoint holds a part of it: the layout does not save all that it trains
            found[key.removeprefix(_MOMENT)] = math.inf
            continue
        for (name, tensor), (_, other) in pairs:
            difference = float((tensor - other).abs().max()) / max(float(tensor.abs().max()), floor)
            found[name] = math.inf if math.isnan(difference) else difference
    return found


def relative(actual: Any, expected: Any) -> float:
    """Relative difference of two figures; counts are equal or infinitely far apart, as is what one side lacks."""
    if actual is None or expected is None:
        return math.inf
    if isinstance(actual, int) and isinstance(expected, int):
        return 0.0 if actual == expected else math.inf
    difference = abs(actual - expected) / max(abs(expected), 1e-30)
    return math.inf if math.isnan(difference) else difference


def _figures(line: dict[str, Any]) -> dict[str, Any]:
    """What is compared of one line of metrics, by name; what belongs to a group as group/name."""
    kept = {name: line[name] for name in ("loss", "grad_norm", "routers", *_FIGURES) if name in line}
    return flat(kept)


def _column(name: str) -> Column:
    if name.startswith("routers/"):
        return "router"
    return "loss" if name == "loss" else "grad_norm" if name == "grad_norm" else "figures"


def _finite(noise: float) -> float:
    """Noise that bounds something; a quantity that bf16 changes altogether, such as a count, has none."""
    return noise if math.isfinite(noise) else 0.0


def _first(run: Path) -> Path:
    return run / "checkpoints" / "step-00000001"


class _Gradients:
    """First moments in a checkpoint, one tensor at a time; layers are stacked there and taken apart here."""

    def __init__(self, checkpoint: Path) -> None:
        from mindvl_train.megatron.tensor_files import TensorReader  # imports megatron-core

        self._reader = TensorReader(checkpoint / "tensors")
        self.shapes = {
            key: tuple(stored.shape)
            for key, stored in self._reader.tensors.items()
            if key.startswith(_MOMENT) or key.endswith("expert_bias")
        }

    def read(self, key: str) -> list[tuple[str, Tensor]]:
        """A stored tensor by name, taken apart into those of its layers.

        Raises:
            ValueError: A part of it is not stored.
        """
        name, tensor = key.removeprefix(_MOMENT), self._reader.read_tensor(key).float()
        if ".layers." not in name or re.search(r"\.layers\.\d", name):
            return [(name, tensor)]
        return [(name.replace(".layers.", f".layers.{layer}.", 1), piece) for layer, piece in enumerate(tensor)]
