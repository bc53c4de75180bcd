# SPDX-License-Identifier: Apache-2.0
"""Runs whose expert messages overflow end with the bits of runs with exact sizes, in any layout, and can be resumed.

As a program this file is one of the processes, which train several recipes one after the other.
"""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mindvl_model.adapters import LoRAConfig
from mindvl_model.parallel_config import ParallelConfig, RecomputeConfig
from mindvl_model.testing.ranks import run_ranks
from mindvl_model.testing.tiny import smallest_deepseek_v3, smallest_qwen3_moe
from mindvl_train import CheckpointConfig, ModelSection, OptimizerConfig, RunConfig, run_training

pytestmark = pytest.mark.slow

LATENT, EXPERTS = smallest_deepseek_v3(vocab_size=264, num_layers=4), smallest_qwen3_moe(vocab_size=264)
LORA = LoRAConfig(rank=2, alpha=4)
FULL = RecomputeConfig(kind="full")
# Name -> (model, layout, capacity factor, other settings) of runs in two and in four processes.
TWO: dict[str, tuple[Any, dict[str, int], float, dict[str, Any]]] = {
    "latent attention and prediction": (LATENT, {"ep_size": 2}, 1.2, {"recompute": FULL}),
    "recomputed, moments on the host": (
        EXPERTS,
        {"tp_size": 2, "ep_size": 2},
        1.2,
        {"recompute": FULL, "optimizer": OptimizerConfig(offload=True)},
    ),
    "adapters of experts over four bits": (EXPERTS, {"ep_size": 2}, 1.1, {"adapter": replace(LORA, base_bits=4)}),
    "adapters with dropout": (
        EXPERTS,
        {"ep_size": 2},
        1.1,
        {"adapter": replace(LORA, dropout=0.2, targets=("q_proj", "v_proj"))},
    ),
    "frozen experts": (EXPERTS, {"cp_size": 2, "ep_size": 2}, 1.1, {"phase": "warmup"}),
    "large enough": (EXPERTS, {"ep_size": 2}, 2.0, {}),
}
FOUR: dict[str, tuple[Any, dict[str, int], float, dict[str, Any]]] = {
    "interleaved stages": (LATENT, {"pp_size": 2, "virtual_stages": 2, "ep_size": 2}, 1.2, {}),
    "four blocks": (EXPERTS, {"ep_size": 4, "tp_size": 2}, 1.5, {}),
}


def train_in(processes: int, configs: list[RunConfig], directory: Path) -> None:
    """Train recipes one after the other in so many processes."""
    directory.mkdir(exist_ok=True)
    job = directory / f"job-{processes}"
    job.write_bytes(pickle.dumps(configs))
    run_ranks([__file__, str(job)], processes, timeout_s=100 + 40 * len(configs), imports=("mindvl_train.weights",))


def work(job: Path) -> None:
    """One of the processes."""
    for config in pickle.loads(job.read_bytes()):
        run_training(config)


def lines_of(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]


def numbers(line: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on messages: no times, and no counts of repeated steps."""
    names = ("step", "loss", "grad_norm", "mtp_loss", "routers", "loss_by_source", "since_last", "tokens")
    return {name: line[name] for name in names if name in line}


@pytest.mark.multi
@pytest.mark.parametrize(("processes", "cases"), [(2, TWO), (4, FOUR)])
def test_repeated_steps_end_with_the_bits_of_exact_sizes_also_if_resumed(
    make_config: Callable[..., RunConfig],
    read_tensors: Callable[[Path], dict[str, torch.Tensor]],
    tmp_path: Path,
    processes: int,
    cases: dict[str, tuple[Any, dict[str, int], float, dict[str, Any]]],
) -> None:
    pairs: dict[str, tuple[RunConfig, RunConfig]] = {}
    for number, (name, (model, sizes, factor, more)) in enumerate(cases.items()):
        settings: dict[str, Any] = {
            "steps": 4,
            "model": ModelSection(vision=model.vision, language=model.language),
            "global_batch_size": 4,
            "checkpoints": CheckpointConfig(every_steps=2),
            **more,
        }
        exact = ParallelConfig(**sizes)
        pairs[name] = (
            make_config(f"{number}-exact", parallel=exact, **settings),
            make_config(f"{number}-blocks", parallel=replace(exact, expert_capacity_factor=factor), **settings),
        )
    train_in(processes, [config for pair in pairs.values() for config in pair], tmp_path)
    for name, (exact, blocks) in pairs.items():
        expected, found = lines_of(exact), lines_of(blocks)
        assert [numbers(line) for line in found] == [numbers(line) for line in expected], name
        # The largest message is a property of the routing and not of the messages.
        needed = [line["expert_capacity_needed"] for line in expected]
        assert [line["expert_capacity_needed"] for line in found] == needed, name
        factor = blocks.parallel.expert_capacity_factor
        assert factor is not None
        repeated = sum(one > factor for one in needed)
        assert (found[-1]["repeated_steps"] > 0) == (name != "large enough"), name
        assert expected[-1]["repeated_steps"] == 0
        assert found[-1]["repeated_steps"] >= repeated, name
        ends = [read_tensors(one.out / "checkpoints" / "step-00000004") for one in (exact, blocks)]
        assert ends[0].keys() == ends[1].keys()
        assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0]), name

    before = {name: lines_of(blocks) for name, (_, blocks) in pairs.items()}
    for _, blocks in pairs.values():
        shutil.rmtree(blocks.out / "checkpoints" / "step-00000004")
    train_in(processes, [blocks for _, blocks in pairs.values()], tmp_path / "resumed")
    for name, (exact, blocks) in pairs.items():
        again = lines_of(blocks)
        assert [numbers(line) for line in again] == [numbers(line) for line in before[name]], name
        assert [line["repeated_steps"] for line in again] == [line["repeated_steps"] for line in before[name]], name
        ends = [read_tensors(one.out / "checkpoints" / "step-00000004") for one in (exact, blocks)]
        assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0]), name


if __name__ == "__main__":
    from mindvl_model import set_up_device

    assert os.environ["RANK"]
    set_up_device()
    work(Path(sys.argv[1]))
