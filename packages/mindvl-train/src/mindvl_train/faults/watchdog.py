# SPDX-License-Identifier: Apache-2.0
"""Watchdog: detects that a run is stuck, logs which rank is behind and in which part of a step, and ends the process.

Runs in a thread of every process. The loop reports the start of each part of a step; the thread writes it to
OUT/heartbeat/, one small file per rank, so that a waiting rank can name the rank it waits for. All times are monotonic or
file system times, so that a change of the system clock has no effect.
"""

import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from mindvl_train.signals import STUCK

logger = logging.getLogger(__name__)

# Parts of a step in order; a rank in an earlier part is behind a rank in a later part.
PARTS = ("start", "data", "compute", "reduce", "update", "report", "validation", "checkpoint")

# Kernels are compiled and memory pools grow in the first step; the time of a save depends on the storage. Validation
# begins anew with each group of packs and each generated token.
_SLOW_FACTOR = 3
_SLOW_PARTS = ("checkpoint", "validation")


def outlasting(limit_s: float) -> timedelta:
    """Timeout of collectives: longer than the watchdog's limit, because only the watchdog names the rank that is behind."""
    return timedelta(seconds=(_SLOW_FACTOR + 1) * limit_s) if limit_s else timedelta(days=7)


@dataclass(frozen=True)
class _Activity:
    step: int
    part: str
    since: float  # time.monotonic()


class Watchdog:
    """Ends the process if one part of a step takes too long. Use as a context manager.

    Args:
        out: Output directory; OUT/heartbeat/ and OUT/logs/ are written.
        is_first_of_machine: Whether this process also reports which rank is behind and prints its stacks; one process
            per machine is enough, because it reads the heartbeats of all ranks.
        limit_s: Time limit for one part of a step in seconds; three times that for the first step, for a
            checkpoint and for one group of packs of a validation; 0: no limit.
    """

    def __init__(
        self, out: Path, *, rank: int, num_ranks: int, limit_s: float, is_first_of_machine: bool = True
    ) -> None:
        self._is_first_of_machine = is_first_of_machine
        self._rank, self._num_ranks, self._limit_s = rank, num_ranks, limit_s
        self._heartbeats = out / "heartbeat"
        self._stacks = out / "logs" / f"stuck-rank-{rank:04d}.txt"
        self._activity = _Activity(0, "start", time.monotonic())
        self._interval_s = min(30.0, limit_s / 20)
        self._first_step: int | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mindvl-watchdog", daemon=True)
        self._main = threading.get_ident()

    def __enter__(self) -> Self:
        if self._limit_s:
            self._heartbeats.mkdir(parents=True, exist_ok=True)
            self._stacks.parent.mkdir(parents=True, exist_ok=True)
            self._beat()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def begin(self, part: str, step: int) -> None:
        """Record the start of a part of a step.

        Args:
            part: One of PARTS.
            step: The current step, counted from 1.
        """
        if self._first_step is None and part not in _SLOW_PARTS:  # a resumed run may validate before its first step
            self._first_step = step
        self._activity = _Activity(step, part, time.monotonic())

    def _watch(self) -> None:
        while not self._end.wait(self._interval_s):
            # A C-level timer that also fires if this thread is blocked by a call that holds the GIL.
            faulthandler.dump_traceback_later(_SLOW_FACTOR * self._limit_s, exit=True)
            self._beat()
            activity = self._activity
            is_started = self._first_step is not None and activity.step > self._first_step
            is_fast_part = is_started and activity.part not in _SLOW_PARTS
            allowed_s = self._limit_s * (1 if is_fast_part else _SLOW_FACTOR)
            if time.monotonic() - activity.since > allowed_s:
                self._give_up(activity)

    def _beat(self) -> None:
        activity = self._activity
        path = self._heartbeats / f"rank-{self._rank:04d}.json"
        heartbeat = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": activity.step,
            "part": activity.part,
        }
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(heartbeat) + "\n")
            os.replace(temporary, path)
        except OSError as error:  # a full disk must not end the run
            logger.warning("%s: cannot be written (%s); training continues", path, error)

    def _give_up(self, activity: _Activity) -> None:
        waited_s = time.monotonic() - activity.since
        others = f" {self._ranks_behind()}" if self._is_first_of_machine else ""
        message = (
            f"rank {self._rank} ({socket.gethostname()}, process {os.getpid()}) has been in part '{activity.part}' of "
            f"step {activity.step} for {waited_s:.0f} s, longer than faults.stuck_after_s={self._limit_s:g}; "
            f"it is in {_innermost(self._main)}.{others} All stacks: {self._stacks}. The run ends with exit code "
            f"{STUCK}. Start it again: it resumes from its last checkpoint."
        )
        logger.error("%s", message)
        try:
            with self._stacks.open("w") as file:
                file.write(message + "\n\n")
                file.flush()
                faulthandler.dump_traceback(file)
        except OSError as error:
            logger.error("%s: cannot be written (%s)", self._stacks, error)
        if self._is_first_of_machine:
            faulthandler.dump_traceback(sys.__stderr__ or 2)
        # The launcher kills all processes as soon as one has ended: wait until the other ranks have written their stacks.
        time.sleep(min(10.0, self._limit_s / 5))
        logging.shutdown()
        os._exit(STUCK)

    def _ranks_behind(self) -> str:
        beats = [_read(self._heartbeats / f"rank-{rank:04d}.json") for rank in range(self._num_ranks)]
        missing = [str(rank) for rank, beat in enumerate(beats) if beat is None]
        if missing:
            return f"No heartbeat of rank {', '.join(missing)}."
        return behind([beat for beat in beats if beat is not None], silent_s=self._limit_s / 2)


def behind(beats: list[dict[str, Any]], *, silent_s: float) -> str:
    """One sentence that names the ranks for which the others wait.

    Args:
        beats: Last heartbeat of each rank, with `modified`, the modification time of its file.
        silent_s: A rank whose file is older than the newest one by more than this is considered dead.
    """
    newest = max(beat["modified"] for beat in beats)
    silent = [beat for beat in beats if newest - beat["modified"] > silent_s]
    position = {beat["rank"]: (beat["step"], PARTS.index(beat["part"])) for beat in beats}
    last = [beat for beat in beats if position[beat["rank"]] == min(position.values())]
    slowest = silent or last
    if len(slowest) == len(beats):
        return f"All {len(beats)} ranks are in part '{beats[0]['part']}' of step {beats[0]['step']}."
    shown = "; ".join(
        f"rank {beat['rank']} ({beat['host']}, process {beat['pid']}), "
        + (f"no heartbeat for {newest - beat['modified']:.0f} s, " if silent else "")
        + f"last seen in part '{beat['part']}' of step {beat['step']}"
        for beat in slowest[:8]
    )
    more = f" and {len(slowest) - 8} more" if len(slowest) > 8 else ""
    return f"Behind: {shown}{more}."


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return {**json.loads(path.read_text()), "modified": path.stat().st_mtime}
    except (OSError, ValueError):
        return None


def _innermost(thread: int) -> str:
    """The current calls of a thread, innermost first.

    With gloo a collective is one of them. NCCL and HCCL collectives return immediately, and the thread waits where it
    next reads a result: their own logs name the collective (docs/guides/cluster.md).
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    calls: list[str] = []
    while frame is not None and len(calls) < 5:
        calls.append(f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(calls)
