# SPDX-License-Identifier: Apache-2.0
"""Loss and gradients of a model in any layout, by global name, from processes over gloo: what layouts are compared by.

Comes after rows.py. A tensor is found by the name and place megatron-core's checkpoints give it, so that the comparison
proves them, too. As a program it is one rank: `python -m mindvl_model.testing.layouts JOB`, launcher's variables set.
"""

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindvl_model.accelerator import enter
from mindvl_model.config import MindVLConfig

Piece = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]  # name, shape of the whole, place in it, content


@dataclass(frozen=True)
class Outcome:
    """What one step came to."""

    loss_sum: float
    gradients: dict[str, Tensor]
    load: dict[int, Tensor]  # tokens by expert of each layer with experts
    bias: dict[int, Tensor]  # after the update
    mtp_loss: float
    choices: dict[tuple[int, int], Tensor]  # experts [T, K] by layer and row


def in_one_process(config: MindVLConfig, rows: Sequence[dict[str, Any]], seed: int = 0) -> tuple[Outcome, Any]:
    """Outcome of random weights in the groups of this process, and the weights for in_processes."""
    from mindvl_model.megatron.blocks import Layout
    from mindvl_model.model import MindVLModel
    from mindvl_model.testing.tiny import randomize

    model = MindVLModel(config, Layout())
    randomize(model, seed)
    weights = join([_pieces(model)])
    return _merge([_step(model, rows)]), weights


def in_processes(
    config: MindVLConfig, rows: Sequence[dict[str, Any]], weights: dict[str, Tensor], folder: Path, **sizes: int
) -> Outcome:
    """The same in a layout (tp_size, pp_size, ep_size, dp_size); rows are dealt to data-parallel ranks in turn.

    Raises:
        AssertionError: A process failed, or ranks that hold the same tensor disagree about its gradient.
    """
    job = folder / f"job-{'-'.join(f'{name}{size}' for name, size in sizes.items())}"
    job.write_bytes(pickle.dumps((config, list(rows), weights, sizes)))
    world = sizes.get("dp_size", 1) * sizes.get("tp_size", 1) * sizes.get("pp_size", 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(job)],
            env=os.environ | launcher | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for process in processes:
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 0, said[-4000:]
    finally:
        for process in processes:
            process.kill()
    return _merge([pickle.loads(Path(f"{job}.{rank}").read_bytes()) for rank in range(world)])


def join(parts: Sequence[Sequence[Piece]]) -> dict[str, Tensor]:
    """Whole tensors from the pieces of all ranks; pieces that lie on each other must be equal to rounding."""
    whole: dict[str, Tensor] = {}
    for name, shape, place, content in (piece for pieces in parts for piece in pieces):
        target = whole.setdefault(name, torch.full(shape, torch.nan))[_slices(place, content)]
        if not target.isnan().any():
            difference = (content - target).abs().max()
            assert difference <= 1e-5 * target.abs().max() + 1e-8, f"{name}: ranks differ by {difference}"
        target.copy_(content)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def _merge(results: Sequence[dict[str, Any]]) -> Outcome:
    return Outcome(
        loss_sum=sum(result["loss_sum"] for result in results),
        gradients=join([result["gradients"] for result in results]),
        load={layer: load for result in results for layer, load in result["load"].items()},
        bias={layer: bias for result in results for layer, bias in result["bias"].items()},
        mtp_loss=sum(result["mtp_loss"] for result in results),
        choices={
            (layer, place * result["dp_size"] + result["dp_rank"]): chosen
            for result in results
            for layer, rows in result["choices"].items()
            for place, chosen in enumerate(rows)
        },
    )


def _slices(place: tuple[int, ...], content: Tensor) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(place, content.shape, strict=True))


def _pieces(model: torch.nn.Module) -> list[Piece]:
    """Every tensor of the model on this rank; contents share memory with it."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state: Any = model
    state = state.sharded_state_dict(metadata={"dp_cp_group": group})
    apply_factories(state)
    return [
        (
            entry.key,
            tuple(entry.global_shape),
            tuple(entry.global_offset),
            entry.data.detach()[(None,) * entry.prepend_axis_num],
        )
        for entry in nested_values(state)
        if isinstance(entry, ShardedTensor)
    ]


def _step(model: Any, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Forward and backward over rows by megatron-core's schedule, gradients reduced; then the routers' step."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from mindvl_model.megatron.router import record_routing

    config = model.config
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    config.finalize_model_grads_func = finalize_model_grads
    wrapped.zero_grad_buffer()

    def forward_step(batches: Any, stage: torch.nn.Module) -> tuple[Tensor, Any]:
        row = next(batches)
        output = stage(**row)

        def report(loss_sum: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return loss_sum, (row["labels"] != -100).sum().int(), {"loss_sum": loss_sum.detach()}

        return output, report

    with record_routing(model) as choices:
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(rows),
            model=wrapped,
            num_microbatches=len(rows),
            seq_length=len(rows[0]["input_ids"]),
            micro_batch_size=1,
        )
    mtp_loss = model.take_mtp_loss()
    model.finish_router_step()
    statistics = model.router_statistics()
    for parameter in model.parameters():
        parameter.data.copy_(parameter.main_grad)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):  # a weight without a gradient
            buffer.zero_()
    return {
        "loss_sum": sum(float(report["loss_sum"]) for report in reports),
        "gradients": _pieces(model),
        "load": {one.layer: one.tokens_per_expert for one in statistics},
        "bias": {one.layer: one.bias for one in statistics if one.bias is not None},
        "mtp_loss": 0.0 if mtp_loss is None else float(mtp_loss[:, 0].sum()),
        "choices": choices,
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "dp_size": parallel_state.get_data_parallel_world_size(),
    }


def _run(job: Path) -> None:
    import torch.distributed as dist

    enter()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mindvl_model.megatron.blocks import Layout
    from mindvl_model.model import MindVLModel

    config, rows, weights, sizes = pickle.loads(job.read_bytes())
    dist.init_process_group("gloo")
    dp_size = sizes.pop("dp_size", 1)
    layout = replace(Layout(), **sizes)
    parallel_state.initialize_model_parallel(
        layout.tp_size,
        layout.pp_size,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(0)
    model = MindVLModel(
        config,
        layout,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    for name, _, place, content in _pieces(model):
        content.copy_(weights[name][_slices(place, content)])
    result = _step(model, rows[parallel_state.get_data_parallel_rank() :: dp_size])
    if parallel_state.get_tensor_model_parallel_rank():
        result |= {"loss_sum": 0.0, "mtp_loss": 0.0}  # said by the first of each group
    Path(f"{job}.{dist.get_rank()}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
