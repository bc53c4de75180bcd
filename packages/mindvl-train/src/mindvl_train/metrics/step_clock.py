# SPDX-License-Identifier: Apache-2.0
"""Where the time of a measured step went on this rank.

Told by the loop which part of the step begins, by collectives.py when the process waits for others, and by hooks when
the vision encoder runs. At every moment exactly one phase runs, the innermost one, so the seconds of all phases add up to
the step. step_split.py makes a report of the seconds of all ranks.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from mindvl_train.metrics.collectives import notice_collectives

Phase = Literal["host", "data", "vision", "language", "pipeline", "communication", "optimizer"]
PHASES: tuple[Phase, ...] = ("host", "data", "vision", "language", "pipeline", "communication", "optimizer")

# Parts of a step as the loop names them; what is not here is host. Time in collectives is taken out of each.
_OF_PART: dict[str, Phase] = {"data": "data", "compute": "language", "reduce": "language", "update": "optimizer"}


class StepClock:
    """Measures single steps, from `start` to `stop`; in other steps everything else does nothing.

    On an accelerator by events on the current stream, so that only what the device had to wait for counts; on a CPU by
    the host's clock.

    Args:
        models: Chunks of the model on this pipeline stage; vision and projector of the first one get their own phase.
    """

    def __init__(self, device: torch.device, models: Iterable[torch.nn.Module] = ()) -> None:
        self._device = device
        self._now: Callable[[], Any] = time.perf_counter if device.type == "cpu" else self._event
        self._stack: list[Phase] = ["host"]  # the innermost phase is the last one
        self._marks: list[tuple[Any, Phase]] = []  # from this time on, this phase
        self._restore: Callable[[], None] | None = None  # while a step is measured
        for model in models:
            self._separate_vision(model)

    def start(self) -> None:
        """A step that is measured begins."""
        self.stop()
        self._stack, self._marks = ["host"], []
        self._restore = notice_collectives(self._enter, self._leave)
        self._mark()

    def begin(self, part: str) -> None:
        """A part of the step begins: data, compute, reduce, update, or another one that is host."""
        if self._restore is not None:
            self._stack[0] = _OF_PART.get(part, "host")
            self._mark()

    def stop(self) -> None:
        """The measured step ends, if there is one."""
        if self._restore is not None:
            self._mark()
            self._restore()
            self._restore = None

    def take(self) -> dict[Phase, float] | None:
        """Seconds of each phase in the step that was measured last; None if there is none, or it was taken already.

        Waits for the device.
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
        """Backward reaches the projector last, after the whole language model, because forward ran it first."""
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
        """Between vision and language, where one of them runs."""
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
    """Sum the time from each mark to the next; the last mark ends the step.

    Args:
        between: Seconds from one time to a later one.
    """
    seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
    for (start, name), (end, _) in pairwise(marks):
        seconds[name] += between(start, end)
    return seconds
