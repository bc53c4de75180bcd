# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel processes do what one does, over gloo on loopback."""

import os
import pickle
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mindvl_train import CheckpointConfig, MetricsConfig, RunConfig, run_training

Read = Callable[[Path], dict[str, torch.Tensor]]

WORKER = """
    import os, pickle, signal, sys
    from pathlib import Path
    from mindvl_train import run_training

    config, signalled_rank = pickle.loads(Path(sys.argv[1]).read_bytes())

    def on_step(step, loss):
        if step == 2 and os.environ["RANK"] == signalled_rank:
            os.kill(os.getpid(), signal.SIGTERM)

    result = run_training(config, on_step=on_step)
    print(result.step, result.finished)
"""


def run_two(config: RunConfig, folder: Path, signalled_rank: str | None = None) -> list[str]:
    """Run a configuration in two processes, as torchrun starts them; what each printed last."""
    job = folder / "job.pickle"
    job.write_bytes(pickle.dumps((config, signalled_rank)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WORKER), str(job)],
            env=os.environ | launcher | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = []
    try:
        for worker in workers:
            out, err = worker.communicate(timeout=100)
            assert worker.returncode == 0, err[-3000:]
            printed.append(out.strip().splitlines()[-1])
    finally:
        for worker in workers:
            worker.kill()
    return printed


def assert_near(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        if not name.startswith("optimizer.state.exp_avg"):
            torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.multi
def test_two_processes_give_the_losses_and_weights_of_one_and_resume_in_one(
    make_config: Callable[..., RunConfig],
    read_tensors: Read,
    read_losses: Callable[[RunConfig], list[tuple[int, float, float]]],
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {
        "steps": 4,
        "packs_per_step": 4,
        "checkpoints": CheckpointConfig(every_steps=2),
        "metrics": MetricsConfig(every_steps=1, tensorboard=False),
    }
    one, two = make_config("one", **settings), make_config("two", **settings)
    # Adam's first steps follow the sign of a gradient, so that rounding of nearly zero ones would show: damp them.
    one, two = (replace(config, optimizer=replace(config.optimizer, epsilon=1e-4)) for config in (one, two))
    alone = run_training(one)
    assert run_two(two, tmp_path) == ["4 True", "4 True"]
    for (step, loss, norm), expected in zip(read_losses(two), read_losses(one), strict=True):
        assert (step, loss, norm) == (
            expected[0],
            pytest.approx(expected[1], abs=1e-5),
            pytest.approx(expected[2], 1e-4),
        )
    expected = read_tensors(alone.checkpoint)
    together = two.out / "checkpoints"
    assert_near(read_tensors(together / "step-00000004"), expected)
    ledgers = [(folder / "ledger.json").read_bytes() for folder in (alone.checkpoint, together / "step-00000004")]
    assert ledgers[0] == ledgers[1]

    shutil.rmtree(together / "step-00000004")
    seen: list[int] = []
    resumed = run_training(two, on_step=lambda step, loss: seen.append(step))  # written by two, resumed by one
    assert seen == [3, 4]
    assert_near(read_tensors(resumed.checkpoint), expected)


@pytest.mark.multi
def test_a_signal_to_one_process_stops_both_at_the_same_step(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    assert run_two(make_config(), tmp_path, signalled_rank="1") == ["3 False", "3 False"]
