# SPDX-License-Identifier: Apache-2.0
"""Time of one step by phase on this rank.

The loop reports parts of the step, collectives.py reports waits for other ranks, and module hooks report the vision
encoder. At every moment exactly one phase is active, the innermost one, so the seconds of all phases add up to the step.
step_split.py combines the seconds of all ranks.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from mindvl_train.metrics.collectives import watch_collectives

Phase = Literal["host", "data", "vision", "language", "pipeline", "communication", "optimizer"]
PHASES: tuple[Phase, ...] = ("host", "data", "vision", "language", "pipeline", "communication", "optimizer")

# Phase of each part of the step; others are host. Time in collectives is subtracted.
_OF_PART: dict[str, Phase] = {"data": "data", "compute": "language", "reduce": "language", "update": "optimizer"}


class StepClock:
    """Times single steps, from `start` to `stop`; does nothing in other steps.

    Uses events of the current stream on an accelerator, and the host clock on a CPU.

    Args:
        models: Model chunks of this pipeline rank; vision encoder and projector have their own phase.
    """

    def __init__(self, device: torch.device, models: Iterable[torch.nn.Module] = ()) -> None:
        self._device = device
        self._now: Callable[[], Any] = time.perf_counter if device.type == "cpu" else self._event
        self._stack: list[Phase] = ["host"]  # the last entry is the innermost phase
        self._marks: list[tuple[Any, Phase]] = []  # start time of each phase
        self._restore: Callable[[], None] | None = None  # set while a step is timed
        for model in models:
            self._separate_vision(model)

    def start(self) -> None:
        """Start timing a step."""
        self.stop()
        self._stack, self._marks = ["host"], []
        self._restore = watch_collectives(self._enter, self._leave)
        self._mark()

    def begin(self, part: str) -> None:
        """Called at the start of each part of the step: data, compute, reduce, update; other parts count as host."""
        if self._restore is not None:
            self._stack[0] = _OF_PART.get(part, "host")
            self._mark()

    def stop(self) -> None:
        """Stop timing, if a step is being timed."""
        if self._restore is not None:
            self._mark()
            self._restore()
            self._restore = None

    def take(self) -> dict[Phase, float] | None:
        """Seconds of each phase of the last timed step; None if there is none, or after a first call.

        Synchronizes with the device.
        """
        marks, self._marks = self._marks, []
        return seconds_by_phase(marks, self._between) if marks else None

    def _enter(self, name: Phase) -> None:
        self._stack.append(name)
        self._mark()

    def _leave(self) -> None:
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        self._marks.append((self._now(), self._stack[-1]))

    def _separate_vision(self, model: torch.nn.Module) -> None:
        """Register hooks; backward reaches the projector after the language model, because forward runs it first."""
        vision_encoder, projector = getattr(model, "vision", None), getattr(model, "projector", None)
        if vision_encoder is None or projector is None:
            return

        def leave_projector(module: torch.nn.Module, given: Any, output: Tensor) -> None:
            self._switch("language")
            if self._restore is not None and output.requires_grad:
                output.register_hook(lambda gradient: self._switch("vision"))

        model.register_forward_pre_hook(lambda module, given: self._switch("language"))
        vision_encoder.register_forward_pre_hook(lambda module, given: self._switch("vision"))
        projector.register_forward_hook(leave_projector)

    def _switch(self, name: Phase) -> None:
        """Switch between vision and language if one of them is active."""
        if self._restore is not None and self._stack[-1] in ("vision", "language"):
            self._stack[-1] = name
            self._mark()

    def _event(self) -> Any:
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        if self._device.type == "cpu":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


def seconds_by_phase(marks: Sequence[tuple[Any, Phase]], between: Callable[[Any, Any], float]) -> dict[Phase, float]:
    """Sum the time from each mark to the next; the last mark is the end of the step.

    Args:
        between: Returns the seconds between two times.
    """
    seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
    for (start, name), (end, _) in pairwise(marks):
        seconds[name] += between(start, end)
    return seconds
