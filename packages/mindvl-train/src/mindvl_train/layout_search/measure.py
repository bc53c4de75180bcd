# SPDX-License-Identifier: Apache-2.0
"""Measure the peak memory of every rank in real training steps, by the parts of the memory estimate.

Verifies memory.py. On a device the peak is that of its allocator. On a CPU the allocations of PyTorch's allocator are
recorded (torch.profiler), also in kernels; Python and NumPy buffers and the copies of gloo are not included. The main
function is one rank, with the variables of a launcher:
`python -m mindvl_train.layout_search.measure JOB`.
"""

import gc
import json
import pickle
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from mindvl_model import MindVLConfig, TokenConfig, set_up_device
from mindvl_train.config import RunConfig
from mindvl_train.devices import DEVICES
from mindvl_train.launch import launch
from mindvl_train.layout_search.blocks import Kernels, Setting
from mindvl_train.layout_search.memory import Ledger, Memory
from mindvl_train.layout_search.packs import Pack
from mindvl_train.layout_search.recorders import CpuRecorder, DeviceRecorder, wait_for_collectives
from mindvl_train.layout_search.request import request_of
from mindvl_train.layout_search.stages import parts_of
from mindvl_train.layout_search.step_time import Machine
from mindvl_train.resolved_run import ResolvedRun, resolve_run

IGNORE_INDEX = -100
_SPECIAL = 7  # lower ids may be special tokens
_ON_HOST = ("cu_seqlens", "image_grid_thw", "loss_positions")  # inputs that the model reads on the host


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured bytes of one rank."""

    pp_rank: int
    parameters: float
    gradients: float
    optimizer: float
    inputs: float
    activations: float  # stored and temporary: the peak minus the bytes between steps
    base: float  # other bytes between steps

    @property
    def total(self) -> float:
        """The peak."""
        return self.parameters + self.gradients + self.optimizer + self.inputs + self.activations + self.base


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to measure, and the pack of every microbatch."""

    run: ResolvedRun
    pack: Pack
    even_experts: bool = False  # send equal numbers of rows to all experts, as estimates and rehearsals assume


def job_of(config: RunConfig, num_processes: int) -> Job:
    """The job of a recipe, with the largest pack that it allows, without a tokenizer."""
    # Only the pack of the request is used, which is the same on every machine.
    pack = request_of(config, Machine(device=DEVICES[0], num_devices=num_processes)).full_pack
    special = TokenConfig(image=1, vision_start=2, vision_end=3, end_of_turn=4, pad=0)
    run = resolve_run(config, num_processes)
    return Job(run=replace(run, model=replace(run.model, tokens=special)), pack=pack)


def measure(job: Job, *, threads_per_process: int = 1) -> list[Measured]:
    """Run two steps in new processes on this machine; returns the peak of the second step by rank.

    Raises:
        TrainError: A process failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "job"
        path.write_bytes(pickle.dumps(job))
        command = [sys.executable, "-m", "mindvl_train.layout_search.measure", str(path)]
        launch(command, job.run.num_processes, threads_per_process=threads_per_process)
        return [Measured(**json.loads(Path(f"{path}.{rank}").read_text())) for rank in range(job.run.num_processes)]


def predict(job: Job, kernels: Kernels) -> list[Memory]:
    """Estimates of memory.py for the same ranks."""
    run, config, parallel = job.run, job.run.config, job.run.parallel
    setting = Setting(
        model=run.model,
        pack=job.pack,
        trained=config.trained_parts,
        lora=config.adapter,
        wide=4 if config.precision == "fp32" else 2,
        kernels=kernels,
        tp_size=parallel.tp_size,
        cp_size=parallel.cp_size,
        ep_size=parallel.ep_size,
        spread_images=bool(parallel.spread_images),
        recompute=config.recompute.kind,
        expert_capacity_factor=parallel.expert_capacity_factor,
    )
    ledger, size = Ledger(setting), parallel.pp_size
    chunks = parts_of(setting).chunks(run.chunk_layers)
    by_stage = [
        ledger.rank(
            parallel,
            config.recompute,
            chunks[rank::size],
            pp_rank=rank,
            dp_size=run.dp_size,
            num_microbatches=run.num_microbatches,
            offload=config.optimizer.offload,
        )
        for rank in range(size)
    ]
    # Pipeline ranks are the outermost coordinate.
    return [by_stage[rank * size // run.num_processes] for rank in range(run.num_processes)]


@dataclass(frozen=True)
class RandomBatch:
    """A pack of given lengths with random content."""

    inputs: dict[str, Any]

    @classmethod
    def of(cls, pack: Pack, model: MindVLConfig, seed: int = 0) -> Self:
        """Placeholders are at the start; loss tokens are evenly distributed."""
        generator = torch.Generator().manual_seed(seed)
        vision = model.vision
        ids = torch.randint(_SPECIAL, model.language.vocab_size, (pack.tokens,), generator=generator)
        ids[torch.isin(ids, torch.tensor([token for token in vars(model.tokens).values() if token is not None]))] = 0
        visual = pack.patches // vision.spatial_merge_size**2
        ids[:visual] = model.tokens.image
        wanted = pack.tokens if pack.num_loss_tokens is None else pack.num_loss_tokens
        due = torch.arange(pack.tokens + 1) * wanted // pack.tokens  # loss tokens before each position
        labels = torch.where(due.diff() > 0, ids, IGNORE_INDEX)
        shape = (pack.patches, vision.in_channels * vision.patch_size**2)
        return cls(
            {
                "input_ids": ids,
                "labels": labels,
                "position_ids": torch.cat([torch.arange(length) for length in pack.segments]).expand(3, -1),
                "cu_seqlens": torch.tensor([0, *pack.segments]).cumsum(0).to(torch.int32),
                "max_seqlen": max(pack.segments),
                "pixel_values": torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8),
                "image_grid_thw": torch.tensor(list(pack.grids), dtype=torch.int64).reshape(-1, 3),
                "loss_positions": (labels != IGNORE_INDEX).nonzero().squeeze(1),
            }
        )

    @property
    def samples(self) -> Sequence[Any]:
        """Random packs have no sample references."""
        return ()

    @property
    def num_loss_tokens(self) -> int:
        """Loss tokens."""
        return len(self.inputs["loss_positions"])  # on the host; labels may be on a device

    def to(self, device: torch.device) -> "RandomBatch":
        """A copy on a device (also on a CPU), except tensors that the model reads on the host."""
        moved = {
            name: value.to(device, copy=True, non_blocking=True)
            if isinstance(value, Tensor) and name not in _ON_HOST
            else value
            for name, value in self.inputs.items()
        }
        return RandomBatch(moved)

    def model_inputs(self) -> dict[str, Any]:
        """Arguments of the model."""
        return dict(self.inputs)


def rank_main(path: Path) -> None:
    """One rank of measure()."""
    job: Job = pickle.loads(path.read_bytes())
    accelerator = set_up_device()
    # Imported here: these modules import megatron-core, which needs the device setup first.
    from mindvl_ops import select_backends
    from mindvl_train.parallel_state import process_groups

    select_backends(job.run.config.ops, accelerator.kind)
    on_cpu = accelerator.kind == "cpu"
    with (
        wait_for_collectives() if on_cpu else nullcontext(),
        process_groups(accelerator, job.run.config.seed, job.run.parallel) as ranks,
    ):
        recorder = CpuRecorder() if on_cpu else DeviceRecorder(ranks.device)
        measured = _measure_steps(job, ranks, recorder)
        Path(f"{path}.{ranks.rank}").write_text(json.dumps(vars(replace(measured, pp_rank=ranks.pp_rank))))


def _measure_steps(job: Job, ranks: Any, recorder: Any) -> Measured:
    from mindvl_model.megatron.router import routers
    from mindvl_model.parameters import initialize
    from mindvl_train.megatron.optimizer import build_optimizer, squared_norm, update, wrap_models
    from mindvl_train.megatron.pipeline import finish_router_step, forward_backward, prepare_schedule
    from mindvl_train.step_totals import reduce_totals
    from mindvl_train.weights import build_models

    with recorder:
        chunks = build_models(job.run, ranks.device, load_init=False)
        for chunk in chunks:
            initialize(chunk, job.run.model, job.run.config.seed)
            for router in routers(chunk) if job.even_experts else ():
                router.register_forward_hook(spread_evenly)
        models = wrap_models(chunks, overlap=job.run.parallel.overlap and ranks.dp_size * ranks.cp_size > 1)
        optimizer = build_optimizer(models, job.run.config.optimizer)
        prepare_schedule(models, optimizer)
        pack = RandomBatch.of(job.pack, job.run.model)
        microbatches = [pack] * job.run.num_microbatches
        for _ in range(2):
            gc.collect()  # free reference cycles of model building and the first step
            recorder.begin_step()
            for model in models:
                model.zero_grad_buffer()  # type: ignore[operator]
            optimizer.zero_grad()
            loss_sum = forward_backward(models, microbatches, ranks.device)
            totals = reduce_totals(squared_norm(optimizer), loss_sum, pack.num_loss_tokens, stop=False)
            update(optimizer, 1e-4, totals.grad_norm)
            finish_router_step(models, was_applied=True)
            recorder.end_step()
        parts = _persistent(chunks, optimizer)
    between, peak = recorder.result()
    moved = pack.to(ranks.device).inputs
    parts["inputs"] = inputs = _bytes(value for name, value in moved.items() if name not in _ON_HOST)
    if ranks.device.type == "cpu":  # exclude the host copy of the pack
        waiting = _bytes(pack.inputs.values())
        between, peak = between - waiting, peak - waiting
    return Measured(
        pp_rank=0,
        **parts,
        activations=peak - between - inputs,
        base=between - sum(parts[name] for name in ("parameters", "gradients", "optimizer")),
    )


def spread_evenly(router: Any, _: Any, output: tuple[Tensor, Tensor]) -> None:
    """Forward hook of a router: replace the chosen experts [T, K], in place, by the next K of all experts in turn.

    The weights stay as they are: no size depends on them. Autograd does not see the change, so that no tensor is kept.
    """
    experts = output[1].data
    experts.copy_(torch.arange(experts.numel(), device=experts.device).view_as(experts) % router.num_experts)


def persistent_tensors(chunks: Sequence[torch.nn.Module], optimizer: Any) -> dict[str, list[Tensor]]:
    """Parameters and buffers, gradient buffers, and optimizer states that exist, on any device."""
    weights: list[Tensor] = [*(p for chunk in chunks for p in chunk.parameters())]
    weights += [buffer for chunk in chunks for buffer in chunk.buffers()]
    held: list[Any] = [getattr(p, "main_grad", None) for chunk in chunks for p in chunk.parameters()]
    buffers = [gradient for gradient in held if gradient is not None]
    state: list[Tensor] = []
    for part in optimizer.chained_optimizers:
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        state += [p for group in inner.param_groups for p in group["params"]]
        state += [value for held in inner.state.values() for value in held.values() if isinstance(value, Tensor)]
    return {"parameters": weights, "gradients": buffers, "optimizer": state}


def _persistent(chunks: Sequence[torch.nn.Module], optimizer: Any) -> dict[str, float]:
    """Bytes of parameters, gradient buffers and optimizer states; each storage is counted once."""
    seen: set[int] = set()
    named = persistent_tensors(chunks, optimizer)
    device = named["parameters"][0].device.type
    return {name: _bytes((t for t in tensors if t.device.type == device), seen) for name, tensors in named.items()}


def _bytes(values: Iterable[Any], seen: set[int] | None = None) -> float:
    """Bytes of the storages of tensors, without those in seen."""
    seen = set() if seen is None else seen
    total = 0
    for value in values:
        if isinstance(value, Tensor) and (address := value.untyped_storage().data_ptr()) not in seen:
            seen.add(address)
            total += value.untyped_storage().nbytes()
    return float(total)


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
