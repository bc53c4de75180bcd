# SPDX-License-Identifier: Apache-2.0
"""Notices that a run no longer moves, says which rank is behind and what it was doing, and ends the process.

Runs beside the loop, in a thread of every process. The loop says which part of a step begins; the thread writes that
to OUT/heartbeat/, one small file per rank, so that a rank that waits can tell for whom. All times are monotonic, or of
the file system alone, so that a clock that is set changes nothing.
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

# Parts of a step in their order; a rank in an earlier part is behind one in a later part.
PARTS = ("start", "data", "compute", "reduce", "update", "report", "checkpoint")

# Until a first step is done, kernels are compiled and memory pools grow; a save takes as long as its storage does.
_RARE_FACTOR = 3


def outlasting(limit_s: float) -> timedelta:
    """How long collectives wait: longer than a watchdog of this limit, which says who is behind; they do not."""
    return timedelta(seconds=(_RARE_FACTOR + 1) * limit_s) if limit_s else timedelta(days=7)


@dataclass(frozen=True)
class _Doing:
    step: int
    part: str
    since: float  # time.monotonic()


class Watchdog:
    """Told what the process does; ends it when one part takes too long. Use as a context.

    Args:
        out: Directory of the run; OUT/heartbeat/ and OUT/logs/ are written.
        is_first_of_machine: Whether it also looks who is behind and shows its stacks; one process of each machine is
            enough, as every look reads the heartbeats of all.
        limit_s: Seconds one part of a step may take; three times as many before the first step is done, and a
            checkpoint; 0: any.
    """

    def __init__(
        self, out: Path, *, rank: int, num_ranks: int, limit_s: float, is_first_of_machine: bool = True
    ) -> None:
        self._speaks = is_first_of_machine
        self._rank, self._num_ranks, self._limit_s = rank, num_ranks, limit_s
        self._heartbeats = out / "heartbeat"
        self._stacks = out / "logs" / f"stuck-rank-{rank:04d}.txt"
        self._doing = _Doing(0, "start", time.monotonic())
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
        """A part of a step begins.

        Args:
            part: One of PARTS.
            step: The step that is being made, counted from 1.
        """
        if self._first_step is None:
            self._first_step = step
        self._doing = _Doing(step, part, time.monotonic())

    def _watch(self) -> None:
        while not self._end.wait(self._interval_s):
            # Fires by itself, in C, when this thread no longer gets its turn: a call that never lets go of Python.
            faulthandler.dump_traceback_later(_RARE_FACTOR * self._limit_s, exit=True)
            self._beat()
            doing = self._doing
            is_started = self._first_step is not None and doing.step > self._first_step
            is_usual = is_started and doing.part != "checkpoint"
            allowed_s = self._limit_s * (1 if is_usual else _RARE_FACTOR)
            if time.monotonic() - doing.since > allowed_s:
                self._give_up(doing)

    def _beat(self) -> None:
        doing = self._doing
        path = self._heartbeats / f"rank-{self._rank:04d}.json"
        said = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": doing.step,
            "part": doing.part,
        }
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(said) + "\n")
            os.replace(temporary, path)
        except OSError as error:  # a full disk must not end the run
            logger.warning("%s: cannot be written (%s); the run goes on", path, error)

    def _give_up(self, doing: _Doing) -> None:
        waited_s = time.monotonic() - doing.since
        others = f" {self._who_is_behind()}" if self._speaks else ""
        message = (
            f"rank {self._rank} ({socket.gethostname()}, process {os.getpid()}) has been in part '{doing.part}' of "
            f"step {doing.step} for {waited_s:.0f} s, longer than faults.stuck_after_s={self._limit_s:g} allows; "
            f"it is in {_innermost(self._main)}.{others} All stacks: {self._stacks}. The run ends "
            f"with exit code {STUCK}; start it again and it goes on from its last checkpoint."
        )
        logger.error("%s", message)
        try:
            with self._stacks.open("w") as file:
                file.write(message + "\n\n")
                file.flush()
                faulthandler.dump_traceback(file)
        except OSError as error:
            logger.error("%s: cannot be written (%s)", self._stacks, error)
        if self._speaks:
            faulthandler.dump_traceback(sys.__stderr__ or 2)
        # The launcher ends all processes as soon as one has gone: let those that wait write their stacks too.
        time.sleep(min(10.0, self._limit_s / 5))
        logging.shutdown()
        os._exit(STUCK)

    def _who_is_behind(self) -> str:
        beats = [_read(self._heartbeats / f"rank-{rank:04d}.json") for rank in range(self._num_ranks)]
        missing = [str(rank) for rank, beat in enumerate(beats) if beat is None]
        if missing:
            return f"No heartbeat of rank {', '.join(missing)}."
        return behind([beat for beat in beats if beat is not None], silent_s=self._limit_s / 2)


def behind(beats: list[dict[str, Any]], *, silent_s: float) -> str:
    """One sentence: which ranks the others wait for.

    Args:
        beats: What each rank wrote last, with `modified`, the time its file was written.
        silent_s: A rank whose file is older than the newest one by more than this shows no sign of life.
    """
    newest = max(beat["modified"] for beat in beats)
    silent = [beat for beat in beats if newest - beat["modified"] > silent_s]
    place = {beat["rank"]: (beat["step"], PARTS.index(beat["part"])) for beat in beats}
    last = [beat for beat in beats if place[beat["rank"]] == min(place.values())]
    named = silent or last
    if len(named) == len(beats):
        return f"All {len(beats)} ranks are in part '{beats[0]['part']}' of step {beats[0]['step']}."
    shown = "; ".join(
        f"rank {beat['rank']} ({beat['host']}, process {beat['pid']}), "
        + (f"no sign of life for {newest - beat['modified']:.0f} s, " if silent else "")
        + f"last seen in part '{beat['part']}' of step {beat['step']}"
        for beat in named[:8]
    )
    more = f" and {len(named) - 8} more" if len(named) > 8 else ""
    return f"Behind: {shown}{more}."


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return {**json.loads(path.read_text()), "modified": path.stat().st_mtime}
    except (OSError, ValueError):
        return None


def _innermost(thread: int) -> str:
    """The calls a thread is in, innermost first.

    Over gloo a collective is one of them. NCCL and HCCL return at once, and the thread waits where it next reads a
    result: then their own logs name the collective (docs/guides/cluster.md).
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    calls: list[str] = []
    while frame is not None and len(calls) < 5:
        calls.append(f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(calls)
