# SPDX-License-Identifier: Apache-2.0
"""Finds ranks that are slow at their own work, for which all others wait in every step.

Runs beside the loop, on every rank. A rank's own work is from the first pack of a step to the moment before gradients
are reduced: data, forward, backward. Tensor, pipeline and context peers wait for each other inside of that, so a slow
rank shows as a group of slow ones; the machine they share, or their common group, is the place to look at.
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

SLOW_SHARE = 0.2  # above the median of all ranks
SLOW_WINDOWS = 3  # consecutive reports; one may be a save of another job or a collection of garbage


class Stragglers:
    """Times the own work of this rank and compares it over ranks, once per window.

    Args:
        every_steps: Steps of one window.
    """

    def __init__(self, *, every_steps: int, device: torch.device) -> None:
        self._every_steps, self._device = every_steps, device
        self._started: Any = None
        self._spans: list[tuple[Any, Any]] = []
        self._consecutive = [0] * dist.get_world_size()
        self._hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(self._hosts, f"{socket.gethostname()}, process {os.getpid()}")

    def begin(self, part: str) -> None:
        """A part of a step begins: data starts the own work, reduce ends it."""
        if part == "data":
            self._started = self._now()
        elif part == "reduce":
            self._spans.append((self._started, self._now()))

    def finish_step(self, step: int) -> list[str]:
        """Compare when a window ends; names, in the log of the first rank, those that were slow in several windows.

        Returns:
            What was logged, on every rank.
        """
        if step % self._every_steps or not self._spans:
            return []
        mine = sum(self._seconds(*span) for span in self._spans) / len(self._spans)
        self._spans = []
        seconds = torch.zeros(len(self._hosts), device=self._device)
        seconds[dist.get_rank()] = mine
        dist.all_reduce(seconds)
        lines = self._compare(seconds.tolist())
        for line in lines if dist.get_rank() == 0 else ():
            logger.warning("%s", line)
        return lines

    def _compare(self, seconds: Sequence[float]) -> list[str]:
        slow, usual = slow_ranks(seconds), median(seconds)
        self._consecutive = [windows + 1 if rank in slow else 0 for rank, windows in enumerate(self._consecutive)]
        return [
            f"rank {rank} ({self._hosts[rank]}) is slow: {seconds[rank]:.4g} s of its own work in a step, the median "
            f"rank {usual:.4g} s, for {self._consecutive[rank] * self._every_steps} steps; all others wait for it"
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
        # The norm of a step was read since, so the device is past both events.
        return float(end - start) if self._device.type == "cpu" else float(start.elapsed_time(end)) / 1000


def slow_ranks(seconds: Sequence[float]) -> list[int]:
    """Ranks whose own work takes clearly longer than that of the median rank.

    Args:
        seconds: By rank.
    """
    usual = median(seconds)
    return [rank for rank, own in enumerate(seconds) if own > (1 + SLOW_SHARE) * usual]
