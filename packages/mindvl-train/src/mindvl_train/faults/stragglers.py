# SPDX-License-Identifier: Apache-2.0
"""Straggler detection: ranks whose own work is slow, so that all other ranks wait for them in every step.

Runs inside the loop, on every rank. The own work of a rank is the time from the first pack of a step until gradients are
reduced: data, forward, backward. The ranks of a model-parallel group wait for each other within that time, so a slow
rank shows as a slow group.
"""

import logging
import os
import socket
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

SLOW_SHARE = 0.2  # fraction above the median of all ranks
SLOW_WINDOWS = 3  # consecutive reports; a single one may be caused by another job or garbage collection


class Stragglers:
    """Measures the own work of this rank and compares it over ranks, once per window.

    Args:
        every_steps: Length of a window in steps.
    """

    def __init__(self, *, every_steps: int, device: torch.device) -> None:
        self._every_steps, self._device = every_steps, device
        self._started: Any = None
        self._spans: list[tuple[Any, Any]] = []
        self._consecutive = [0] * dist.get_world_size()
        self._hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(self._hosts, f"{socket.gethostname()}, process {os.getpid()}")

    def begin(self, part: str) -> None:
        """Called at the start of each part of a step: data starts the own work, reduce ends it."""
        if part == "data":
            self._started = self._now()
        elif part == "reduce":
            self._spans.append((self._started, self._now()))

    def finish_step(self, step: int) -> list[str]:
        """Compare ranks at the end of a window; rank 0 logs those that were slow in several windows.

        Returns:
            The logged lines, on every rank.
        """
        if step % self._every_steps or not self._spans:
            return []
        own = sum(self._seconds(*span) for span in self._spans) / len(self._spans)
        self._spans = []
        seconds = torch.zeros(len(self._hosts), device=self._device)
        seconds[dist.get_rank()] = own
        dist.all_reduce(seconds)
        lines = self._compare(seconds.tolist())
        for line in lines if dist.get_rank() == 0 else ():
            logger.warning("%s", line)
        return lines

    def _compare(self, seconds: Sequence[float]) -> list[str]:
        slow, typical = slow_ranks(seconds), median(seconds)
        self._consecutive = [windows + 1 if rank in slow else 0 for rank, windows in enumerate(self._consecutive)]
        return [
            f"rank {rank} ({self._hosts[rank]}) is slow: {seconds[rank]:.4g} s of own work per step, median over ranks "
            f"{typical:.4g} s, for {self._consecutive[rank] * self._every_steps} steps; all other ranks wait for it"
            for rank in slow
            if self._consecutive[rank] % SLOW_WINDOWS == 0
        ]

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        # The gradient norm was read after both events, so they are complete.
        return float(end - start) if self._device.type == "cpu" else float(start.elapsed_time(end)) / 1000


def slow_ranks(seconds: Sequence[float]) -> list[int]:
    """Ranks whose own work takes longer than the median by more than SLOW_SHARE.

    Args:
        seconds: Own work of each rank in seconds.
    """
    typical = median(seconds)
    return [rank for rank, own in enumerate(seconds) if own > (1 + SLOW_SHARE) * typical]
