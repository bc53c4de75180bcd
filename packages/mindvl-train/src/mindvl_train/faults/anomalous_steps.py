# SPDX-License-Identifier: Apache-2.0
"""Anomalous steps: loss or gradient norm not finite, or a spike. They end the run, or are skipped and logged.

Comes between backward and update, inside the step; every rank has the same values and makes the same decision.
"""

import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mindvl_train.config import FaultsConfig
from mindvl_train.errors import TrainError
from mindvl_train.interfaces import Batch
from mindvl_train.parallel_state import ParallelState
from mindvl_train.state import TrainState
from mindvl_train.step_totals import StepTotals

logger = logging.getLogger(__name__)

NORMS_KEPT = 100
NORMS_NEEDED = 10  # the first norms and losses of a run vary by factors, so spikes are detected only after this many


class AnomalousSteps:
    """Decides for every step whether its gradients may be applied.

    Recent norms and losses are in the train state, so that a resumed run makes the same decisions.

    Args:
        out: Output directory; an anomalous step is appended to OUT/skipped.jsonl with all of its samples.
    """

    def __init__(self, config: FaultsConfig, out: Path, state: TrainState, ranks: ParallelState) -> None:
        self._config, self._state, self._ranks = config, state, ranks
        self._path = out / "skipped.jsonl"
        if ranks.is_first:
            _drop_after(self._path, state.step)

    def accepts(self, totals: StepTotals, loss_sum: Tensor, packs: Sequence[Batch]) -> bool:
        """Whether the step after state.step may update the model; collective over all ranks if it may not.

        Args:
            totals: Gradient norm, loss and loss tokens over all ranks.
            loss_sum: Loss sum of this rank.
            packs: Packs of this rank.

        Raises:
            TrainError: The step is anomalous and the policy is to stop, or too many consecutive steps were skipped.
        """
        state, grad_norm = self._state, totals.grad_norm
        loss = totals.loss_sum / max(1, totals.num_loss_tokens)
        reason = self._anomaly(grad_norm, loss)
        if reason is None:
            state.norms = [*state.norms, grad_norm][-NORMS_KEPT:]
            state.losses = [*state.losses, loss][-NORMS_KEPT:] if totals.num_loss_tokens else state.losses
            state.consecutive_skips = 0
            return True
        stops = self._config.on_anomalous_step == "stop" or state.consecutive_skips >= self._config.max_skipped
        record = self._record(reason, grad_norm, loss_sum, packs, action="stopped" if stops else "skipped")
        if self._ranks.is_first:
            _append(self._path, record)
        if stops:
            raise TrainError(self._message(reason, record))
        state.skipped += 1
        state.consecutive_skips += 1
        if self._ranks.is_first:
            logger.warning("step %d: %s; skipped, its samples are listed in %s", record["step"], reason, self._path)
        return False

    def _anomaly(self, grad_norm: float, loss: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        config, state = self._config, self._state
        for what, value, name, factor, before in (
            ("gradient norm", grad_norm, "spike_factor", config.spike_factor, state.norms),
            ("loss", loss, "loss_spike_factor", config.loss_spike_factor, state.losses),
        ):
            if factor is not None and len(before) >= NORMS_NEEDED and value > factor * (typical := median(before)):
                return (
                    f"the {what} {value:.4g} is more than faults.{name}={factor:g} times {typical:.4g}, "
                    f"the median of the last {len(before)} steps"
                )
        return None

    def _record(
        self, reason: str, grad_norm: float, loss_sum: Tensor, packs: Sequence[Batch], *, action: str
    ) -> dict[str, Any]:
        own = {
            "rank": dist.get_rank(),
            "dp_rank": self._ranks.dp_rank,
            "loss_sum": _finite_or_text(float(loss_sum)),
            "num_loss_tokens": sum(pack.num_loss_tokens for pack in packs),
            "packs": [[[s.source, s.epoch, s.shard, s.sample_index, s.key] for s in pack.samples] for pack in packs],
        }
        records: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(records, own)
        # One record per model-parallel group: that of a rank whose loss is not finite, if there is one.
        seen: dict[int, dict[str, Any]] = {}
        for one in records:
            if one["dp_rank"] not in seen or isinstance(one["loss_sum"], str):
                seen[one["dp_rank"]] = one
        return {
            "step": self._state.step + 1,
            "action": action,
            "why": reason,
            "grad_norm": _finite_or_text(grad_norm),
            "ranks": [seen[dp_rank] for dp_rank in sorted(seen)],
        }

    def _message(self, reason: str, record: dict[str, Any]) -> str:
        ranks = record["ranks"]
        shown = next((one for one in ranks if isinstance(one["loss_sum"], str)), ranks[0])
        samples = [sample for pack in shown["packs"] for sample in pack]
        first = ", ".join(f"{source} {shard} sample {index} ({key})" for source, _, shard, index, key in samples[:3])
        skips = self._state.consecutive_skips
        before = f", after {skips} consecutive skipped steps (faults.max_skipped)" if skips else ""
        stopped = self._config.on_anomalous_step == "stop"
        remedy = "skip such steps with faults.on_anomalous_step=skip" if stopped else "raise faults.max_skipped"
        return (
            f"step {record['step']}: {reason}{before}; the model was not updated. Rank {shown['rank']} trained on "
            f"{len(shown['packs'])} packs of {len(samples)} samples, the first: {first}; the samples of all ranks are "
            f"listed in {self._path}. Check these samples, lower schedule.peak_lr, or {remedy}."
        )


def _finite_or_text(value: float) -> float | str:
    """The value, or text for nan and infinity, which JSON cannot represent."""
    return value if math.isfinite(value) else str(value)


def _append(path: Path, record: dict[str, Any]) -> None:
    try:
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:  # the other ranks continue
        logger.warning("%s: cannot be written (%s): %s", path, error, json.dumps(record))


def _drop_after(path: Path, step: int) -> None:
    """Remove lines of steps after the resumed one: these steps run again and are logged again if they are anomalous.

    Damaged lines are kept, so that verification of the run reports them; an incomplete last line is removed.
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
