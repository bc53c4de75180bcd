# SPDX-License-Identifier: Apache-2.0
"""One rank of a rehearsal: where it is in the run, and the record of what it did.

Takes the place of the watchdog, which every part of a step calls, and of the saver of checkpoints (stage.py).
"""

import gc
import resource
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Self

import torch

from mindvl_ops import backend_table
from mindvl_ops.npu import masks
from mindvl_train.layout_search.measure import persistent_tensors
from mindvl_train.megatron.checkpoint import allocate_states, owned_pieces, unwrap
from mindvl_train.megatron.groups import expert_coordinates
from mindvl_train.rehearsal.answers import ASSUMPTIONS, NOT_COVERED
from mindvl_train.rehearsal.fake_device import FakeDevice
from mindvl_train.rehearsal.job import Job, Kind, described, versions
from mindvl_train.rehearsal.memory import MemoryLog
from mindvl_train.rehearsal.messages import MessageLog, Moment
from mindvl_train.rehearsal.operators import is_on_device
from mindvl_train.rehearsal.record import (
    CheckpointRecord,
    HostWait,
    MissingOperator,
    OperatorCount,
    PhaseRecord,
    RankRecord,
)

# Parts of the model in the order in which the breakdown of activations names them.
_PARTS = ("vision", "projector", "language.embedding", "language.decoder", "language.mtp", "language.output_layer")
_DISPATCH_KEYS: dict[Kind, str] = {"npu": "PrivateUse1", "cuda": "CUDA"}


class Rank:
    """The rank of this process.

    Args:
        job: What is rehearsed.
        device: The device that the rank believes to have.
        progress: File for the share of the forward passes that have begun.
    """

    stall_s = 0.0  # of the saver
    failed = False

    def __init__(self, job: Job, device: torch.device, progress: Path) -> None:
        self.job = job
        self._progress = progress
        self.at = Moment()
        self.messages = MessageLog(self.at)
        self.memory = MemoryLog(is_device=device.type != "cpu")
        self.device_mode = FakeDevice(device, self.at, self.memory, self.messages)
        self.phases: list[PhaseRecord] = []
        self.persistent: dict[str, int] = {}
        self.peak: Any = None
        self.checkpoint: CheckpointRecord | None = None
        self.coordinates: dict[str, int] = {}
        self.num_microbatches = 0
        self._state: Any = None
        self._began = self._since = time.monotonic()
        self._first = (0, 0.0, 0.0, 0.0)
        self._passes: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def during(self, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that begins a phase."""

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter(phase, -1)
            return original(*args, **kwargs)

        return call

    def building(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """_build_state, after which the categories of weights, gradients and optimizer states are known."""

        def build_state(run: Any, ranks: Any, **options: Any) -> Any:
            names = ("tp", "pp", "cp", "dp")
            self.coordinates = {
                f"{name}_{end}": getattr(ranks, f"{name}_{end}") for name in names for end in ("rank", "size")
            }
            self.coordinates |= expert_coordinates()
            self.num_microbatches = run.num_microbatches
            if self.job.kind == "npu":  # kept for the whole run; a fake mask would be made anew in each attention
                mask = torch.ones(masks.MASK_SIDE, masks.MASK_SIDE, dtype=torch.bool, device=ranks.device)
                masks._shared[ranks.device] = mask
            state, source = original(run, ranks, **options)
            self._state = state
            if self.job.steps == 1:  # as after a resume
                allocate_states(state.optimizer)
            self._assign()
            self._watch(state.models)
            self.device_mode.is_building = False
            return state, source

        return build_state

    def begin(self, part: str, step: int) -> None:
        """Called at the start of each part of a step, counted from 1."""
        if part == "data":
            self._assign()
            gc.collect()
            self._passes = [0] * len(self._state.models)
            self.persistent = self.memory.categories()
            if step == self.job.steps:
                self.memory.restart()
                for counts in (self.device_mode.counts, self.device_mode.costs, self.device_mode.waits):
                    counts.clear()
                self.device_mode.wait_bytes.clear()
        elif part == "checkpoint":
            self.peak = self.memory.peak()
        self._enter(part, step - 1)

    def save(self, state: Any) -> Path:
        """Count what this rank would write."""
        pieces = owned_pieces(state.models, state.optimizer)
        size = sum(piece.content.numel() * piece.content.itemsize for piece in pieces)
        names = {piece.key for piece in pieces}
        self.checkpoint = CheckpointRecord(num_tensors=len(names), num_chunks=len(pieces), num_bytes=size)
        return Path("rehearsal")

    def record(self) -> RankRecord:
        """What the rank did; call after the run."""
        self._enter("end", self.job.steps)
        job, mode = self.job, self.device_mode
        categories, timeline = self.memory.timeline()
        return RankRecord(
            recipe=job.recipe,
            recipe_digest=job.digest,
            versions=versions(),
            device=job.device,
            device_kind=job.kind,
            kernels={row.operator: row.chosen for row in backend_table()},
            rank=job.rank,
            world_size=job.world_size,
            coordinates=self.coordinates,
            num_steps=job.steps,
            num_microbatches=self.num_microbatches,
            pack=described(job.pack),
            groups=self.messages.used_groups(),
            messages=tuple(self.messages.messages),
            phases=tuple(self.phases),
            timeline=timeline,
            categories=categories,
            peak=self.peak,
            persistent=self.persistent,
            operators=_operators(mode),
            waits=_waits(mode),
            missing=_missing(mode, job.kind),
            checkpoint=self.checkpoint,
            assumptions=ASSUMPTIONS,
            not_covered=NOT_COVERED,
            wall_s=time.monotonic() - self._began,
            host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    def _enter(self, name: str, step: int) -> None:
        mode, now = self.device_mode, time.monotonic()
        flops, read, written = mode.totals
        first = (self.at.operator, flops, read, written)
        before = self._first
        self.phases.append(
            PhaseRecord(
                name=self.at.phase,
                step=self.at.step,
                first_operator=before[0],
                num_operators=first[0] - before[0],
                flops=first[1] - before[1],
                bytes_read=first[2] - before[2],
                bytes_written=first[3] - before[3],
                peak_bytes=self.memory.take_phase_peak(),
                end_bytes=self.memory.now,
                wall_s=now - self._since,
            )
        )
        self._first, self._since = first, now
        self.at.phase, self.at.step = name, step
        mode.phase = len(self.phases)

    def _assign(self) -> None:
        """Weights, gradients and optimizer states are known by the objects that hold them."""
        chunks = [unwrap(model) for model in self._state.models]
        named = persistent_tensors(chunks, self._state.optimizer)
        for category, tensors in reversed(named.items()):  # float32 weights are also those of the optimizer
            self.memory.assign(tensors, category)

    def _watch(self, models: list[torch.nn.Module]) -> None:
        for number, model in enumerate(models):
            model.register_forward_pre_hook(lambda *_, number=number: self._start_pass(number))
            model.register_forward_hook(lambda *_: self._end_pass())
            chunk = unwrap(model)
            for name in _PARTS:
                try:
                    part = chunk.get_submodule(name)
                except AttributeError:  # this stage lacks it
                    continue
                if isinstance(part, torch.nn.Module):
                    self.device_mode.modules.watch(name.removeprefix("language."), part)
            for name, part in chunk.named_modules():
                if name.endswith((".self_attention", ".mlp")) and name.startswith("language."):
                    kind = (
                        "attention" if name.endswith("attention") else "experts" if hasattr(part, "router") else "mlp"
                    )
                    self.device_mode.modules.watch(f"decoder {kind}", part)

    def _start_pass(self, number: int) -> None:
        self.at.microbatch = self._passes[number]
        of_step = self.num_microbatches * len(self._passes)
        done = self.at.step * of_step + sum(self._passes)
        self._progress.write_text(str(done / (of_step * self.job.steps)))
        self._passes[number] += 1

    def _end_pass(self) -> None:
        self.at.microbatch = None


def _operators(mode: FakeDevice) -> dict[str, OperatorCount]:
    found = {}
    for func, count in sorted(mode.counts.items(), key=lambda item: -item[1]):
        flops, read, written = mode.costs.get(func, (0.0, 0.0, 0.0))
        found[str(func)] = OperatorCount(count=count, flops=flops, bytes_read=read, bytes_written=written)
    return found


def _waits(mode: FakeDevice) -> tuple[HostWait, ...]:
    return tuple(
        HostWait(
            source=source, caller=caller, operator=name, kind=kind, count=count,
            num_bytes=mode.wait_bytes[source, caller, name, kind],
        )
        for (source, caller, name, kind), count in mode.waits.most_common()
    )  # fmt: skip


def _missing(mode: FakeDevice, kind: Kind) -> dict[str, MissingOperator]:
    key = _DISPATCH_KEYS.get(kind)
    return {
        str(func): MissingOperator(source=mode.sources.get(func, "?"), count=count)
        for func, count in mode.counts.items()
        if key is not None and not is_on_device(func, key)
    }
