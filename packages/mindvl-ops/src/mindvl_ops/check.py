# SPDX-License-Identifier: Apache-2.0
"""`check_operators`: which backend runs each operator, how far it differs from the reference on this machine, and how fast it is.

The reference is computed on the CPU in float64 from the same rounded inputs, so that an error is that of the tested
backend alone. Printed by `mindvl check ops`, and at the start of every training run without the times.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .backend import backend_table, use_backend
from .cases import Case, cases
from .testing.parity import TOLERANCES

DTYPES = (torch.float32, torch.bfloat16)
_TIMED_TOKENS = 512
_ROUNDS = 7


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Largest difference to the reference, relative to the largest expected value (at least 1), in one type."""

    forward: float
    backward: float | None  # None for an operator without gradients
    tolerance: float
    reason: str = ""  # why it could not run; the errors are then NaN

    @property
    def holds(self) -> bool:
        """Whether it ran and is near enough."""
        return not self.reason and max(self.forward, self.backward or 0.0) <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """One operator."""

    operator: str
    chosen: str
    why_not: dict[str, str]  # every other backend -> reason
    comparisons: dict[str, Comparison]  # "float32" -> how near the chosen backend is
    speed_ratio: float | None  # time of the reference / time of the chosen backend, float32, with gradients

    @property
    def holds(self) -> bool:
        """Whether the chosen backend is near enough to the reference in every type."""
        return all(comparison.holds for comparison in self.comparisons.values())


def check_operators(
    *, device: torch.device | str = "cpu", dtypes: Sequence[torch.dtype] = DTYPES, timed: bool = False
) -> list[CheckRow]:
    """Run every operator once on small seeded inputs, as chosen, and compare it with the reference.

    The random state of the process is not touched.

    Args:
        device: Where the chosen backends run.
        timed: Also time each operator against the reference on larger inputs, on the same device.
    """
    large = cases(torch.float32, tokens=_TIMED_TOKENS) if timed else {}
    small = {dtype: cases(dtype) for dtype in dtypes}
    rows = []
    for row in backend_table():
        comparisons = {
            str(dtype).removeprefix("torch."): _compare(by_operator[row.operator], device, TOLERANCES[dtype])
            for dtype, by_operator in small.items()
        }
        runs = any(not comparison.reason for comparison in comparisons.values())
        ratio = _speed_ratio(large[row.operator], device) if timed and runs and row.chosen != "reference" else None
        rows.append(
            CheckRow(
                operator=row.operator,
                chosen=row.chosen,
                why_not=row.why_not,
                comparisons=comparisons,
                speed_ratio=ratio,
            )
        )
    return rows


def table_text(rows: Sequence[CheckRow]) -> str:
    """The rows as one table of plain text."""
    names = list(dict.fromkeys(name for row in rows for name in row.comparisons))
    lines = [["operator", "backend", *(f"{name} forward/backward" for name in names), "speed", "why not the others"]]
    for row in rows:
        speed = "" if row.speed_ratio is None else f"{row.speed_ratio:.1f} x"
        why_not = "; ".join(f"{backend}: {reason}" for backend, reason in row.why_not.items())
        lines.append([row.operator, row.chosen, *(_errors(row.comparisons[name]) for name in names), speed, why_not])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _errors(comparison: Comparison) -> str:
    if comparison.reason:
        return comparison.reason
    backward = "-" if comparison.backward is None else f"{comparison.backward:.0e}"
    return f"{comparison.forward:.0e} / {backward}{'' if comparison.holds else ' ABOVE TOLERANCE'}"


def _compare(case: Case, device: torch.device | str, tolerance: float) -> Comparison:
    with use_backend("reference"):
        expected = _run(case, [x.double() for x in case.inputs])
    try:
        actual = _run(case, [x.to(device) for x in case.inputs])
    except (
        Exception
    ) as error:  # the kernel rejects this type or device: reported in the table, and the others are checked
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        return Comparison(forward=float("nan"), backward=None, tolerance=tolerance, reason=reason)
    errors = [_error(left, right) for left, right in zip(actual, expected, strict=True)]
    return Comparison(forward=errors[0], backward=max(errors[1:], default=None), tolerance=tolerance)


def _run(case: Case, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output and, where there are any, the gradients, for a fixed output gradient."""
    leaves = [x.detach().requires_grad_(case.trains) for x in inputs]
    output = case.function(*leaves)
    if not case.trains:
        return [output]
    grad = torch.linspace(-1.0, 1.0, output.numel(), dtype=torch.float64).reshape(output.shape)
    # The sum has the output gradient `grad`. torch.autograd imports sympy to check the shape of one that is passed in.
    loss = (output * grad.to(output)).sum()
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [output.detach(), *gradients]


def _error(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.cpu().double() - expected.double()).abs().max().item()
    return difference / max(1.0, expected.abs().max().item())


def _speed_ratio(case: Case, device: torch.device | str) -> float:
    """Median time of the reference over that of the chosen backend, in turn, so that other load meets both."""
    inputs = [x.to(device) for x in case.inputs]
    times: dict[str, list[float]] = {"reference": [], "chosen": []}
    for _ in range(_ROUNDS):
        with use_backend("reference"):
            times["reference"].append(_seconds(case, inputs))
        times["chosen"].append(_seconds(case, inputs))
    return statistics.median(times["reference"][1:]) / statistics.median(times["chosen"][1:])


def _seconds(case: Case, inputs: Sequence[Tensor]) -> float:
    start = time.perf_counter()
    _run(case, inputs)
    if inputs[0].device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start
