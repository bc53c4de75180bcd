# SPDX-License-Identifier: Apache-2.0
"""What this process is doing right now, and where the time of a measured step went.

The step says what it does with `phase`; collectives.py says when it waits for others. A StepClock turns that into
seconds: at every moment exactly one phase runs, the innermost one, so the seconds of all phases add up to the step.
A watchdog asks `current_phase` (and collectives.last_collective) from its own thread.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

Phase = Literal["host", "data", "vision", "language", "pipeline", "communication", "optimizer"]
PHASES: tuple[Phase, ...] = ("host", "data", "vision", "language", "pipeline", "communication", "optimizer")

_stack: list[Phase] = ["host"]  # of this process; the innermost phase is the last one
_stamp: Callable[[], Any] | None = None  # while a step is measured: what time is it
_marks: list[tuple[Any, Phase]] = []  # from this time on, this phase


def current_phase() -> Phase:
    """What the process is in: host is everything that has no name of its own."""
    return _stack[-1]


def is_measuring() -> bool:
    """Whether a step is being measured right now."""
    return _stamp is not None


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """The block is this phase, but for phases inside of it."""
    enter_phase(name)
    try:
        yield
    finally:
        leave_phase()


def enter_phase(name: Phase) -> None:
    """Begin a phase inside the current one; for where a `with` costs too much. leave_phase must follow."""
    _stack.append(name)
    _mark()


def leave_phase() -> None:
    """End the innermost phase."""
    _stack.pop()
    _mark()


def separate_vision(model: torch.nn.Module) -> None:
    """Let tower and projector of a model be the phase "vision" in forward and backward; the rest stays "language".

    Backward reaches the projector last, after the whole language model, because forward ran it first. Does nothing on
    a pipeline stage without a tower.
    """
    tower, projector = getattr(model, "vision", None), getattr(model, "projector", None)
    if tower is None or projector is None:
        return

    def leave_projector(module: torch.nn.Module, given: Any, output: Tensor) -> None:
        _switch("language")
        if is_measuring() and output.requires_grad:
            output.register_hook(lambda gradient: _switch("vision"))

    model.register_forward_pre_hook(lambda module, given: _switch("language"))
    tower.register_forward_pre_hook(lambda module, given: _switch("vision"))
    projector.register_forward_hook(leave_projector)


class StepClock:
    """Measures single steps of this rank.

    On an accelerator by events on the current stream, so that only what the device had to wait for counts; on a CPU by
    the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measured: list[tuple[Any, Phase]] = []

    @contextmanager
    def measure(self, wanted: bool) -> Iterator[None]:
        """Measure the block if it is wanted; nothing otherwise."""
        global _stamp
        if not wanted:
            yield
            return
        _stamp = time.perf_counter if self._device.type == "cpu" else self._event
        _marks.clear()
        _mark()
        try:
            yield
            _mark()
            self._measured = list(_marks)
        finally:
            _stamp = None

    def take(self) -> dict[Phase, float] | None:
        """Seconds of each phase in the step that was measured last; None if there is none, or it was taken already.

        Waits for the device.
        """
        marks, self._measured = self._measured, []
        if not marks:
            return None
        return seconds_by_phase(marks, _seconds_between if self._device.type == "cpu" else self._device_seconds)

    def _event(self) -> Any:
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event

    def _device_seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


def seconds_by_phase(
    marks: Sequence[tuple[Any, Phase]], between: Callable[[Any, Any], float] | None = None
) -> dict[Phase, float]:
    """Sum the time from each mark to the next; the last mark ends the step.

    Args:
        between: Seconds from one time to a later one; their difference if not given.
    """
    seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
    between = between or _seconds_between
    for (start, name), (end, _) in pairwise(marks):
        seconds[name] += between(start, end)
    return seconds


def _seconds_between(start: float, end: float) -> float:
    return end - start


def _switch(name: Phase) -> None:
    """Change between vision and language where one of them runs."""
    if _stack[-1] in ("vision", "language"):
        _stack[-1] = name
        _mark()


def _mark() -> None:
    if _stamp is not None:
        _marks.append((_stamp(), _stack[-1]))
