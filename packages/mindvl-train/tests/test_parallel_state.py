# SPDX-License-Identifier: Apache-2.0
"""Several processes do what one does, in any layout and whatever their packs hold, over gloo on loopback.

As a program this file is one of the processes: a job is a list of tasks, so that processes are started once.
"""

import faulthandler
import io
import json
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from mindvl_data import SourceConfig, index_directory, write_shards
from mindvl_data.quarantine import read_quarantine
from mindvl_model import MindVLConfig, set_up_device
from mindvl_model.parallel_config import BuildConfig, ParallelConfig, RecomputeConfig
from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.ranks import run_ranks
from mindvl_model.testing.tiny import smallest_config
from mindvl_train import CheckpointConfig, MetricsConfig, OptimizerConfig, RunConfig, TrainError, run_training
from mindvl_train.faults.watchdog import outlasting

pytestmark = pytest.mark.slow

Read = Callable[[Path], dict[str, torch.Tensor]]
ReadLosses = Callable[[RunConfig], list[tuple[int, float, float]]]

HANGS_AFTER_S = 200
# Adam's first steps follow the sign of a gradient, so that rounding of nearly zero ones would show: damp them.
DAMPED = OptimizerConfig(epsilon=1e-4)


def start(tasks: Sequence[tuple[str, Any]], directory: Path, *, processes: int) -> list[list[Any]]:
    """Do tasks one after the other in so many processes, as torchrun starts them; results of every rank by task."""
    job = directory / "job.pickle"
    job.write_bytes(pickle.dumps(tasks))
    run_ranks(
        [__file__, str(job)],
        processes,
        timeout_s=HANGS_AFTER_S * (len(tasks) + 1),
        imports=("mindvl_train.weights", "mindvl_train.loop", "transformers"),
    )
    by_rank = [pickle.loads(Path(f"{job}.{rank}").read_bytes()) for rank in range(processes)]
    return [list(results) for results in zip(*by_rank, strict=True)]


def work(job: Path) -> None:
    """One of the processes."""
    kinds: dict[str, Callable[..., Any]] = {"run": whole_run, "mixture": train_on_mixture}
    results = [kinds[kind](*given) for kind, given in pickle.loads(job.read_bytes())]
    Path(f"{job}.{os.environ['RANK']}").write_bytes(pickle.dumps(results))


def whole_run(config: RunConfig, signalled_rank: str | None = None) -> tuple[int, bool]:
    """A run; one rank may be asked to stop after its second step."""

    def on_step(step: int, loss: float | None) -> None:
        if step == 2 and os.environ["RANK"] == signalled_rank:
            os.kill(os.getpid(), signal.SIGTERM)

    result = run_training(config, on_step=on_step)
    return result.step, result.finished


@dataclass(frozen=True)
class Pack:
    """A pack as the loader would give it."""

    inputs: dict[str, Any]
    samples: tuple[Any, ...] = ()

    @property
    def num_loss_tokens(self) -> int:
        return int((self.inputs["labels"] != -100).sum())

    def to(self, device: torch.device) -> Self:
        return self

    def model_inputs(self) -> dict[str, Any]:
        return self.inputs


def mixture(config: MindVLConfig) -> list[list[Pack]]:
    """Four steps of four packs: images on every second rank, none at all, nothing but images, a bit of all."""

    def pack(*images: tuple[int, int, int], text: int, seed: int, learns: bool = True) -> Pack:
        inputs = pack_segments([random_segment(config, images, num_text=text, seed=seed)])
        if not learns:
            inputs["labels"].fill_(-100)
            inputs["loss_positions"] = torch.tensor([], dtype=torch.int64)
        return Pack(inputs)

    one, two = (1, 4, 4), (1, 2, 6)
    return [
        [pack(one, text=6, seed=1), pack(text=17, seed=2), pack(two, one, text=3, seed=3), pack(text=9, seed=4)],
        [pack(text=8 + seed, seed=seed) for seed in range(5, 9)],
        [pack(one, two, text=0, seed=seed, learns=seed != 10) for seed in range(9, 13)],
        [
            pack(text=5, seed=13),
            pack(two, text=4, seed=14),
            pack(text=7, seed=15, learns=False),
            pack(one, text=2, seed=16),
        ],
    ]


def train_on_mixture(
    model: MindVLConfig, parallel: ParallelConfig, recompute: RecomputeConfig, trained: Sequence[Any]
) -> list[tuple[float, int, float]]:
    """(loss sum, loss tokens, gradient norm) of each step on this rank."""
    accelerator = set_up_device()
    from mindvl_model.megatron.stages import build_stages
    from mindvl_model.parameters import initialize, set_trainable
    from mindvl_train.megatron.optimizer import build_optimizer, wrap_models
    from mindvl_train.megatron.pipeline import prepare_schedule
    from mindvl_train.parallel_state import process_groups
    from mindvl_train.step import train_step

    build_config = BuildConfig(parallel=parallel, recompute=recompute)
    with process_groups(accelerator, 0, parallel) as ranks:
        models = build_stages(model, build_config)
        for chunk in models:
            initialize(chunk, model, 0)
            set_trainable(chunk, trained)
        wrapped = wrap_models(models, overlap=parallel.overlap and ranks.dp_size * ranks.cp_size > 1)
        optimizer = build_optimizer(wrapped, DAMPED)
        prepare_schedule(wrapped, optimizer)
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)  # from here on, nothing has to be imported
        reports = [
            train_step(
                wrapped,
                optimizer,
                iter(packs[ranks.dp_rank :: ranks.dp_size]),  # type: ignore[arg-type]  # peers have nothing to agree on
                num_microbatches=len(packs) // ranks.dp_size,
                learning_rate=3e-3,
                ranks=ranks,
                may_update=lambda totals, loss_sum, packs: True,
            )
            for packs in mixture(model)
        ]
        faulthandler.cancel_dump_traceback_later()
        return [(float(report.loss_sum), report.num_loss_tokens, report.grad_norm) for report in reports]


def test_processes_that_would_share_a_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindvl_train.parallel_state import _check_device

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    _check_device(0, 1, world_size=1)
    with pytest.raises(TrainError, match=r"LOCAL_RANK: is not set.*export LOCAL_RANK=\$SLURM_LOCALID"):
        _check_device(0, 8, world_size=16)
    monkeypatch.setenv("LOCAL_RANK", "8")
    with pytest.raises(TrainError, match=r"LOCAL_RANK: is 8, but 8 devices are visible"):
        _check_device(8, 8, world_size=16)


def test_collectives_of_all_groups_wait_longer_than_the_watchdog() -> None:
    accelerator = set_up_device()
    from megatron.core import parallel_state

    from mindvl_train.parallel_state import process_groups

    timeout = outlasting(120)
    assert timeout == timedelta(minutes=8)  # the watchdog allows a save 6
    with process_groups(accelerator, seed=0, timeout=timeout):
        for group in (dist.group.WORLD, parallel_state.get_data_parallel_group()):
            assert group._get_backend(torch.device("cpu")).options._timeout == timeout  # type: ignore[union-attr]


ALL = ("vision", "projector", "language")
LAYOUTS: dict[str, tuple[ParallelConfig, RecomputeConfig, Sequence[str]]] = {
    "tp2 pp2": (ParallelConfig(tp_size=2, pp_size=2), RecomputeConfig(), ALL),
    "dp2 cp2, overlapped": (ParallelConfig(cp_size=2), RecomputeConfig(), ALL),
    "dp2 pp2 vpp2, recomputed": (ParallelConfig(pp_size=2, virtual_stages=2), RecomputeConfig(kind="full"), ALL),
    "tp2 cp2, images spread": (ParallelConfig(tp_size=2, cp_size=2, spread_images=True), RecomputeConfig(), ALL),
    "dp2 pp2, projector only": (ParallelConfig(pp_size=2), RecomputeConfig(), ("projector",)),
}


@pytest.mark.multi
def test_packs_with_and_without_images_train_as_in_one_process_in_any_layout(tmp_path: Path) -> None:
    """A rank without images, a step without any, packs of nothing else: nothing hangs and no number changes."""
    small = smallest_config()
    model = replace(small, language=replace(small.language, num_layers=4))
    tasks = [("mixture", (model, *layout)) for layout in LAYOUTS.values()]
    alone: dict[Sequence[str], Any] = {
        trained: train_on_mixture(model, ParallelConfig(), RecomputeConfig(), trained)
        for trained in (ALL, ("projector",))
    }
    for (name, layout), by_rank in zip(LAYOUTS.items(), start(tasks, tmp_path, processes=4), strict=True):
        for step, (expected, *reported) in enumerate(zip(alone[layout[2]], *by_rank, strict=True)):
            loss, labels, norm = expected
            assert sum(one[0] for one in reported) == pytest.approx(loss, rel=1e-5), (name, step)
            assert sum(one[1] for one in reported) == labels, (name, step)
            assert [one[2] for one in reported] == [pytest.approx(norm, rel=1e-5)] * len(reported), (name, step)


def assert_near(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        if not name.startswith("optimizer.state.exp_avg"):
            torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def damaged_source(directory: Path) -> SourceConfig:
    """Twelve images; the third lacks its second half, but has a header and an end, so that the index takes it."""
    directory.mkdir()
    records = []
    for number in range(12):
        file = io.BytesIO()
        noise = np.random.default_rng(number).integers(0, 256, (56, 56, 3), dtype=np.uint8)
        Image.fromarray(noise).save(file, "JPEG")
        content = file.getvalue()
        (directory / f"{number}.jpg").write_bytes(
            content[: len(content) // 2] + b"\xff\xd9" if number == 2 else content
        )
        turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": f"number {number}"}]
        records.append({"id": f"n{number}", "image": f"{number}.jpg", "conversations": turns})
    (directory / "records.json").write_text(json.dumps(records))
    write_shards(directory / "records.json", directory / "shards", format="llava")
    index_directory(directory / "shards")
    return SourceConfig(name="damaged", path=directory / "shards")


@dataclass(frozen=True)
class Runs:
    """Whole runs in two processes, and what they are compared with."""

    one: RunConfig  # as in one process, which trains it
    two: RunConfig
    damaged: RunConfig
    damaged_stages: RunConfig
    ends: list[list[tuple[int, bool]]]  # (step, finished) of both ranks, by task


@pytest.fixture(scope="module")
def runs(config_for: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory = tmp_path_factory.mktemp("runs")
    settings: dict[str, Any] = {
        "steps": 4,
        "global_batch_size": 4,
        "checkpoints": CheckpointConfig(every_steps=2),
        "metrics": MetricsConfig(every_steps=1, tensorboard=False),
        "optimizer": DAMPED,
    }
    one, two = (config_for(directory / name, **settings) for name in ("one", "two"))
    source = damaged_source(directory / "damaged-raw")
    bad, stages = (
        replace(config, data=replace(config.data, sources=(source,)))
        for config in (
            config_for(directory / "damaged", **settings),
            config_for(directory / "damaged-stages", parallel=ParallelConfig(pp_size=2), **settings),
        )
    )
    tasks = [("run", (two,)), ("run", (config_for(directory / "stopped"), "1")), ("run", (stages,))]
    return Runs(one, two, bad, stages, start(tasks, directory, processes=2))


def assert_same_losses(read_losses: ReadLosses, actual: RunConfig, expected: RunConfig) -> None:
    for (step, loss, norm), (same_step, same_loss, same_norm) in zip(
        read_losses(actual), read_losses(expected), strict=True
    ):
        assert (step, loss, norm) == (same_step, pytest.approx(same_loss, 1e-5), pytest.approx(same_norm, 1e-5))


@pytest.mark.multi
def test_two_processes_give_the_losses_and_weights_of_one_and_resume_in_one(
    runs: Runs, read_tensors: Read, read_losses: ReadLosses
) -> None:
    alone = run_training(runs.one)
    assert runs.ends[0] == [(4, True), (4, True)]
    assert_same_losses(read_losses, runs.two, runs.one)
    expected = read_tensors(alone.checkpoint)
    together = runs.two.out / "checkpoints"
    assert_near(read_tensors(together / "step-00000004"), expected)
    ledgers = [(directory / "ledger.json").read_bytes() for directory in (alone.checkpoint, together / "step-00000004")]
    assert ledgers[0] == ledgers[1]

    shutil.rmtree(together / "step-00000004")
    seen: list[int] = []
    resumed = run_training(runs.two, on_step=lambda step, loss: seen.append(step))  # written by two, resumed by one
    assert seen == [3, 4]
    assert_near(read_tensors(resumed.checkpoint), expected)


@pytest.mark.multi
def test_a_signal_to_one_process_stops_both_at_the_same_step(runs: Runs) -> None:
    assert runs.ends[1] == [(3, False), (3, False)]


@pytest.mark.multi
def test_an_image_that_the_first_stage_cannot_decode_has_no_loss_on_the_last(
    runs: Runs, read_tensors: Read, read_losses: ReadLosses
) -> None:
    alone = run_training(runs.damaged)
    assert runs.ends[2] == [(4, True), (4, True)]
    assert_same_losses(read_losses, runs.damaged_stages, runs.damaged)
    pages = [list(read_quarantine(config.out / "quarantine.jsonl")) for config in (runs.damaged, runs.damaged_stages)]
    assert [bad.sample_index for bad in pages[0]] == [2]
    assert pages[0] == pages[1]
    assert_near(read_tensors(runs.damaged_stages.out / "checkpoints" / "step-00000004"), read_tensors(alone.checkpoint))


if __name__ == "__main__":
    work(Path(sys.argv[1]))
