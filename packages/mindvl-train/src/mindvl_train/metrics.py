# SPDX-License-Identifier: Apache-2.0
"""Numbers of a run: gathered on the device every step, reduced over ranks once per report, handed to sinks.

Comes after the step; sinks.py writes what this makes.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mindvl_train.state import TrainState
from mindvl_train.step import StepReport


class Sink(Protocol):
    """Takes one report; exists on the first rank only."""

    def write(self, report: dict[str, Any]) -> None:
        """Write one report: step, loss, learning_rate, grad_norm, tokens, rates."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class Metrics:
    """Sums since the last report."""

    def __init__(self, sinks: Sequence[Sink], every_steps: int, device: torch.device) -> None:
        self.sinks, self.every_steps, self.device = sinks, every_steps, device
        # NPUs reduce no float64; one report's loss sum is well inside float32.
        self._loss_sum = torch.zeros((), dtype=torch.float32 if device.type == "npu" else torch.float64, device=device)
        self._counts = [0, 0, 0]  # learned tokens, tokens, patches; on the host, which knows them anyway
        self._since = time.perf_counter()
        self._steps = 0

    def add(self, state: TrainState, step: StepReport, *, report_now: bool) -> float | None:
        """Count one step and report when it is due; returns the mean loss since the last report when it was."""
        self._loss_sum += step.loss_sum
        counts = (step.num_label_tokens, step.num_tokens, step.num_patches)
        self._counts = [before + now for before, now in zip(self._counts, counts, strict=True)]
        self._steps += 1
        if state.step % self.every_steps == 0 or report_now:
            return self._report(state, step)
        return None

    def close(self) -> None:
        """Close every sink."""
        for sink in self.sinks:
            sink.close()

    def _report(self, state: TrainState, step: StepReport) -> float:
        counts = torch.tensor(self._counts, device=self.device)
        dist.all_reduce(counts)
        dist.all_reduce(self._loss_sum)
        label_tokens, tokens, patches = counts.tolist()
        state.label_tokens += label_tokens
        state.tokens += tokens
        elapsed = time.perf_counter() - self._since
        report = {
            "step": state.step,
            "loss": float(self._loss_sum) / max(1, label_tokens),
            "learning_rate": step.learning_rate,
            "grad_norm": step.grad_norm,
            "label_tokens": state.label_tokens,
            "tokens": state.tokens,
            "patches_per_step": patches / self._steps,
            "tokens_per_s": tokens / elapsed,
            "seconds_per_step": elapsed / self._steps,
        }
        for sink in self.sinks:
            sink.write(report)
        self._loss_sum.zero_()
        self._counts = [0, 0, 0]
        self._since, self._steps = time.perf_counter(), 0
        return report["loss"]
