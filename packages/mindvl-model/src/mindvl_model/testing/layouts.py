# SPDX-License-Identifier: Apache-2.0
"""Loss and gradients of a model in any layout, by global name, from processes over gloo: what layouts are compared by.

Comes after rows.py and megatron/one_step.py. As a program it is one rank: `python -m mindvl_model.testing.layouts JOB`
with the variables of a launcher set.
"""

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
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
    from mindvl_model.megatron.one_step import pieces, step
    from mindvl_model.model import MindVLModel
    from mindvl_model.testing.tiny import randomize

    model = MindVLModel(config, Layout())
    randomize(model, seed)
    weights = join([pieces(model)])
    return _merge([step(model, rows)]), weights


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
    for name, shape, place, content in chain(*parts):
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


def _run(job: Path) -> None:
    enter()
    from mindvl_model.megatron.blocks import Layout
    from mindvl_model.megatron.one_step import launched_process, pieces, step
    from mindvl_model.model import MindVLModel

    config, rows, weights, sizes = pickle.loads(job.read_bytes())
    dp_size = sizes.pop("dp_size", 1)
    layout = Layout(**sizes)
    with launched_process(layout) as place:
        model = MindVLModel(config, layout, pre_process=place.is_first_stage, post_process=place.is_last_stage)
        for name, _, start, content in pieces(model):
            content.copy_(weights[name][_slices(start, content)])
        result = step(model, rows[place.dp_rank :: dp_size])
        if place.tp_rank:
            result |= {"loss_sum": 0.0, "mtp_loss": 0.0}  # said by the first of each group
        Path(f"{job}.{place.rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
