# SPDX-License-Identifier: Apache-2.0
"""A bad step: loss or gradient norm not finite, or a spike. It ends the run, or is left out and written down.

Comes between backward and update, inside the step; every rank sees the same numbers and decides alike.
"""

import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindvl_train.config import FaultsConfig
from mindvl_train.errors import TrainError
from mindvl_train.interfaces import Batch
from mindvl_train.parallel_state import ParallelState
from mindvl_train.state import TrainState

logger = logging.getLogger(__name__)

NORMS_KEPT = 100
NORMS_NEEDED = 10  # the first norms and losses of a run differ by factors, so nothing is called a spike before


class AnomalousSteps:
    """Decides of every step whether its gradients may be applied.

    Keeps its memory in the train state, so that a resumed run decides like one that never stopped.

    Args:
        out: Directory of the run; a bad step becomes a line of OUT/skipped.jsonl, with every sample.
    """

    def __init__(self, config: FaultsConfig, out: Path, state: TrainState, ranks: ParallelState) -> None:
        self._config, self._state, self._ranks = config, state, ranks
        self._path = out / "skipped.jsonl"
        if ranks.is_first:
            _drop_after(self._path, state.step)

    def accepts(self, grad_norm: float, loss_sum: Tensor, packs: Sequence[Batch]) -> bool:
        """Whether the step that follows state.step may update; called by every rank.

        Args:
            grad_norm: Over all ranks, before clipping.
            loss_sum: Of this rank.
            packs: Of this rank.

        Raises:
            TrainError: The step is bad and the policy is to stop, or too many consecutive steps were skipped.
        """
        ranks, state = self._ranks, self._state
        speaks = ranks.tp_rank == 0  # tensor-parallel peers have the same losses
        count = sum(pack.num_loss_tokens for pack in packs) if ranks.is_first_in_group else 0
        total = torch.stack((speaks * loss_sum.detach(), torch.full_like(loss_sum, count)))
        dist.all_reduce(total)
        summed, learned = total.tolist()
        loss = summed / max(1.0, learned)
        why = self._why_bad(grad_norm, loss)
        if why is None:
            state.norms = [*state.norms, grad_norm][-NORMS_KEPT:]
            state.losses = [*state.losses, loss][-NORMS_KEPT:] if learned else state.losses
            state.consecutive_skips = 0
            return True
        stops = self._config.on_anomalous_step == "stop" or state.consecutive_skips >= self._config.max_skipped
        record = self._record(why, grad_norm, loss_sum, packs, action="stopped" if stops else "skipped")
        if self._ranks.is_first:
            _append(self._path, record)
        if stops:
            raise TrainError(self._message(why, record))
        state.skipped += 1
        state.consecutive_skips += 1
        if self._ranks.is_first:
            logger.warning("step %d: %s; left out, its samples stand in %s", record["step"], why, self._path)
        return False

    def _why_bad(self, grad_norm: float, loss: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        config, state = self._config, self._state
        for what, value, name, factor, before in (
            ("gradient norm", grad_norm, "spike_factor", config.spike_factor, state.norms),
            ("loss", loss, "loss_spike_factor", config.loss_spike_factor, state.losses),
        ):
            if factor is not None and len(before) >= NORMS_NEEDED and value > factor * (usual := median(before)):
                return (
                    f"the {what} {value:.4g} is more than faults.{name}={factor:g} times {usual:.4g}, "
                    f"the median of the last {len(before)} steps"
                )
        return None

    def _record(
        self, why: str, grad_norm: float, loss_sum: Tensor, packs: Sequence[Batch], *, action: str
    ) -> dict[str, Any]:
        mine = {
            "rank": dist.get_rank(),
            "dp_rank": self._ranks.dp_rank,
            "loss_sum": _finite_or_text(float(loss_sum)),
            "num_loss_tokens": sum(pack.num_loss_tokens for pack in packs),
            "packs": [[[s.source, s.epoch, s.shard, s.sample_index, s.key] for s in pack.samples] for pack in packs],
        }
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        # Tensor, pipeline and context peers train the same packs; a loss that is not finite is told in any case.
        seen: dict[int, dict[str, Any]] = {}
        for one in everyone:
            if one["dp_rank"] not in seen or isinstance(one["loss_sum"], str):
                seen[one["dp_rank"]] = one
        return {
            "step": self._state.step + 1,
            "action": action,
            "why": why,
            "grad_norm": _finite_or_text(grad_norm),
            "ranks": [seen[dp_rank] for dp_rank in sorted(seen)],
        }

    def _message(self, why: str, record: dict[str, Any]) -> str:
        ranks = record["ranks"]
        guilty = next((one for one in ranks if isinstance(one["loss_sum"], str)), ranks[0])
        samples = [sample for pack in guilty["packs"] for sample in pack]
        named = ", ".join(f"{source} {shard} pack {pack} ({key})" for source, _, shard, pack, key in samples[:3])
        left_out = self._state.consecutive_skips
        before = f", after {left_out} consecutive skipped steps (faults.max_skipped)" if left_out else ""
        stopped = self._config.on_anomalous_step == "stop"
        other_way = (
            "go on without such steps by faults.on_anomalous_step=skip" if stopped else "raise faults.max_skipped"
        )
        return (
            f"step {record['step']}: {why}{before}, so nothing was updated. Rank {guilty['rank']} trained on "
            f"{len(guilty['packs'])} packs of {len(samples)} samples, the first: {named}; all of them, and those of the "
            f"other ranks, are in {self._path}. Look at them, lower schedule.peak_lr, or {other_way}."
        )


def _finite_or_text(value: float) -> float | str:
    """JSON knows no nan and no infinity."""
    return value if math.isfinite(value) else str(value)


def _append(path: Path, record: dict[str, Any]) -> None:
    try:
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:  # the other processes are about to go on
        logger.warning("%s could not be written (%s): %s", path, error, json.dumps(record))


def _drop_after(path: Path, step: int) -> None:
    """Steps after the one that was resumed run again, and are written down again where they are bad again.

    A line that is damaged stays, so that the verification of the run names it; the end of one that a kill cut off goes.
    """
    if not path.is_file():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step and line.endswith(b"\n"):
                kept.append(line)
        except (ValueError, TypeError, KeyError, RecursionError):
            if line.endswith(b"\n"):
                kept.append(line)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(b"".join(kept))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
