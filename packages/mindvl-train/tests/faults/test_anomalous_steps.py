# SPDX-License-Identifier: Apache-2.0
"""Anomalous steps end the run or are skipped and logged; kills at any moment change nothing in the end."""

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from mindvl_data.types import SampleReference
from mindvl_model import set_up_device
from mindvl_train import CheckpointConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainError, run_training
from mindvl_train.config import FaultsConfig
from mindvl_train.parallel_state import ParallelState, process_groups
from mindvl_train.state import TrainState
from mindvl_train.step_totals import StepTotals

pytestmark = pytest.mark.slow

Read = Callable[[Path], dict[str, torch.Tensor]]
NAN = float("nan")


@dataclass(frozen=True)
class Pack:
    """As much of a pack as is written down."""

    samples: tuple[SampleReference, ...]
    num_loss_tokens: int = 7

    def to(self, device: torch.device) -> Self:
        return self

    def model_inputs(self) -> dict[str, Any]:
        return {}


def pack_of(number: int) -> Pack:
    return Pack(
        (
            SampleReference(
                source="pages", epoch=0, shard="shard-000000.tar", sample_index=number, key=f"n{number}", length=9
            ),
        )
    )


PACKS = [pack_of(3), pack_of(4)]


@pytest.fixture
def ranks() -> Iterator[ParallelState]:
    with process_groups(set_up_device(), seed=0) as here:
        yield here


def decide(
    state: TrainState, config: FaultsConfig, out: Path, ranks: ParallelState, numbers: list[tuple[float, float]]
) -> list[bool]:
    """The decisions over steps with these (loss sums, gradient norms)."""
    from mindvl_train.faults.anomalous_steps import AnomalousSteps

    anomalous_steps, decisions = AnomalousSteps(config, out, state, ranks), []
    for loss, norm in numbers:
        totals = StepTotals(grad_norm=norm, loss_sum=loss, num_loss_tokens=14, overflowed=False, stop=False)
        decisions.append(anomalous_steps.accepts(totals, torch.tensor(loss), PACKS))
        state.step += 1
    return decisions


def fresh(**counters: Any) -> TrainState:
    return TrainState(models=[], optimizer=None, source=None, **counters)  # type: ignore[arg-type]


def written(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("loss", "norm", "why"),
    [(NAN, 1.0, "the loss is nan"), (float("-inf"), NAN, "the loss is -inf"), (2.0, NAN, "the gradient norm is nan")],
)
def test_a_number_that_is_not_finite_ends_the_run_and_names_step_and_samples(
    tmp_path: Path, ranks: ParallelState, loss: float, norm: float, why: str
) -> None:
    state = fresh(step=41)
    with pytest.raises(TrainError) as caught:
        decide(state, FaultsConfig(), tmp_path, ranks, [(loss, norm)])
    message = str(caught.value)
    assert message.startswith(
        f"step 42: {why}; the model was not updated. Rank 0 trained on 2 packs of 2 samples, the first: "
    )
    assert "pages shard-000000.tar sample 3 (n3)" in message
    (line,) = written(tmp_path)
    assert (line["step"], line["action"], line["why"]) == (42, "stopped", why)
    assert (state.norms, state.skipped) == ([], 0)


def test_a_skipped_step_is_written_down_and_leaves_no_trace_in_what_is_usual(
    tmp_path: Path, ranks: ParallelState
) -> None:
    state = fresh()
    config = FaultsConfig(on_anomalous_step="skip", spike_factor=3.0)
    calm = [(2.0, 1.0), (2.0, 1.2)] * 5
    # A spike is above three times the median, 1.1; it does not raise the median for the next.
    assert decide(state, config, tmp_path, ranks, [*calm, (2.0, 3.31), (2.0, 3.29), (NAN, NAN)]) == (
        [True] * 10 + [False, True, False]
    )
    assert (state.skipped, state.consecutive_skips, state.norms) == (2, 1, [1.0, 1.2] * 5 + [3.29])
    first, second = written(tmp_path)
    assert (first["step"], first["grad_norm"], first["action"]) == (11, 3.31, "skipped")
    assert "more than faults.spike_factor=3 times 1.1, the median of the last 10 steps" in first["why"]
    samples = [[["pages", 0, "shard-000000.tar", 3, "n3"]], [["pages", 0, "shard-000000.tar", 4, "n4"]]]
    assert first["ranks"] == [{"rank": 0, "dp_rank": 0, "loss_sum": 2.0, "num_loss_tokens": 14, "packs": samples}]
    assert (second["step"], second["grad_norm"], second["ranks"][0]["loss_sum"]) == (13, "nan", "nan")


def test_a_loss_far_above_the_usual_one_is_a_spike_too(tmp_path: Path, ranks: ParallelState) -> None:
    state = fresh()
    config = FaultsConfig(on_anomalous_step="skip", loss_spike_factor=1.5)
    # 14 loss tokens, so the mean loss is 2 before and 3.1 in the spike; the norm does not move.
    assert decide(state, config, tmp_path, ranks, [*[(28.0, 1.0)] * 10, (43.4, 1.0), (41.9, 1.0)]) == (
        [True] * 10 + [False, True]
    )
    assert state.losses == pytest.approx([2.0] * 10 + [41.9 / 14])
    (line,) = written(tmp_path)
    assert "the loss 3.1 is more than faults.loss_spike_factor=1.5 times 2, the median of the last 10" in line["why"]


def test_a_full_disk_does_not_end_a_run_that_skips_anomalous_steps(
    tmp_path: Path, ranks: ParallelState, caplog: pytest.LogCaptureFixture
) -> None:
    config = FaultsConfig(on_anomalous_step="skip")
    assert decide(fresh(), config, tmp_path / "gone", ranks, [(NAN, 1.0)]) == [False]
    assert "skipped.jsonl: cannot be written" in caplog.text
    assert "n3" in caplog.text


def test_the_first_steps_are_never_spikes_and_the_oldest_norms_are_forgotten(
    tmp_path: Path, ranks: ParallelState
) -> None:
    state = fresh()
    config = FaultsConfig(spike_factor=2.0)
    wild = [(2.0, 10.0**power) for power in range(9)]
    assert decide(state, config, tmp_path, ranks, [*wild, *[(2.0, 1.0)] * 120]) == [True] * 129
    assert state.norms == [1.0] * 100


def test_too_many_consecutive_anomalous_steps_end_the_run(tmp_path: Path, ranks: ParallelState) -> None:
    state = fresh()
    config = FaultsConfig(on_anomalous_step="skip", max_skipped=2)
    assert decide(state, config, tmp_path, ranks, [(NAN, 1.0), (NAN, 1.0), (2.0, 1.0), (NAN, 1.0), (NAN, 1.0)]) == [
        *(False, False, True, False, False)
    ]
    message = r"step 6: the loss is nan, after 2 consecutive skipped steps.*or raise faults\.max_skipped\."
    with pytest.raises(TrainError, match=message):
        decide(state, config, tmp_path, ranks, [(NAN, 1.0)])


def test_lines_after_the_resumed_step_are_dropped_and_a_cut_one_too(tmp_path: Path, ranks: ParallelState) -> None:
    config = FaultsConfig(on_anomalous_step="skip")
    decide(fresh(), config, tmp_path, ranks, [(NAN, 1.0)] * 3)
    with (tmp_path / "skipped.jsonl").open("a") as file:
        file.write('{"step": 2, "act')
    decide(fresh(step=2), config, tmp_path, ranks, [(NAN, 1.0)])
    assert [line["step"] for line in written(tmp_path)] == [1, 2, 3]


def test_skipped_steps_change_nothing_and_a_resumed_run_skips_the_same_ones(
    make_config: Callable[..., RunConfig], read_tensors: Read
) -> None:
    settings: dict[str, Any] = {
        # Weights that hardly move, so that norms go up and down with the packs: some steps are above the median.
        "schedule": ScheduleConfig(steps=20, peak_lr=1e-5),
        "faults": FaultsConfig(on_anomalous_step="skip", spike_factor=1.01),
        "checkpoints": CheckpointConfig(every_steps=1, keep_last=20),
    }
    straight = run_training(make_config("straight", **settings))
    skipped = [line["step"] for line in written(straight.out)]
    assert 2 <= len(skipped) < 10
    directory = straight.out / "checkpoints"
    for step in skipped[:2]:
        before, after = (read_tensors(directory / f"step-{number:08d}") for number in (step - 1, step))
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())

    config = make_config("stopped", **settings)

    def stop(step: int, loss: float | None) -> None:
        if step == skipped[0]:
            os.kill(os.getpid(), signal.SIGUSR1)

    assert not run_training(config, on_step=stop).finished
    resumed = run_training(replace(config, checkpoints=CheckpointConfig(every_steps=20)))
    assert [line["step"] for line in written(config.out)] == skipped
    expected, actual = read_tensors(straight.checkpoint), read_tensors(resumed.checkpoint)
    assert all(torch.equal(tensor, actual[name]) for name, tensor in expected.items())


# Imports once and forks the processes of each start, so that a start costs a second instead of ten. A run is killed at
# given steps, a little later or while it starts, with any number of processes, and started again until it is done.
CHAOS = """
    import gc, json, os, pickle, random, signal, sys, time
    from contextlib import ExitStack
    from pathlib import Path
    import mindvl_train.weights  # megatron-core and all the rest, before the forks
    from mindvl_ops.runtime.ports import reserved_port
    from mindvl_train import run_training

    gc.collect()
    gc.freeze()  # every run collects garbage, and need not look at what is imported

    quiet, restless, num_kills, seed = pickle.loads(Path(sys.argv[1]).read_bytes())
    choose = random.Random(seed)

    ports = ExitStack()  # held until this process ends

    def start(config, world, waits=False):
        port = ports.enter_context(reserved_port())
        children = []

        def on_step(step, loss):
            progress(config).write_text(str(step))
            while waits and step == config.schedule.steps:  # for the kill, which a run that has ended would not notice
                time.sleep(1)

        for rank in range(world):
            if child := os.fork():
                children.append(child)
                continue
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            os.environ.update({name: str(value) for name, value in variables.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            log = os.open(config.out.with_suffix(f".rank{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1), os.dup2(log, 2)
            code = 1
            try:
                run_training(config, on_step=on_step)
                code = 0
            finally:
                os._exit(code)
        return children

    def progress(config):
        return config.out.with_suffix(".step")

    def reap(children, wait_s):
        # As a launcher does: who does not end with the others is killed.
        left, deadline, codes = list(children), time.monotonic() + wait_s, []
        while left:
            for child in list(left):
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    left.remove(child)
                    codes.append(os.waitstatus_to_exitcode(status))
            if left and time.monotonic() > deadline:
                for child in left:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        return codes

    assert reap(start(quiet, 1), 600) == [0]
    kills = []
    steps = quiet.schedule.steps
    for target in sorted(choose.choices(range(steps - 1), k=num_kills)):
        world = choose.choice([1, 2, 2, 4])
        starting = choose.random() < 0.2
        progress(restless).write_text("0")
        children = start(restless, world, waits=True)
        ended = False
        while not starting and int(progress(restless).read_text() or 0) <= target and not ended:
            time.sleep(0.002)
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        assert not ended, f"a process ended by itself, for step {target}"
        time.sleep(choose.random() * (1.0 if starting else 0.15))
        victims = children if choose.random() < 0.5 else [choose.choice(children)]
        for child in victims:
            os.kill(child, signal.SIGKILL)
        codes = reap(children, 1.0)
        kills.append([world, "start" if starting else target + 1, len(victims), codes])
    assert reap(start(restless, 2), 600) == [0, 0]
    print(json.dumps(kills))
"""


@pytest.mark.multi
def test_kills_at_any_moment_with_any_number_of_processes_change_nothing_in_the_end(
    make_config: Callable[..., RunConfig],
    read_tensors: Read,
    read_losses: Callable[[RunConfig], list[tuple[int, float, float]]],
    tmp_path: Path,
) -> None:
    """MINDVL_CHAOS_KILLS=20 kills more often than the everyday four times, MINDVL_CHAOS_SEED at other moments."""
    num_kills, seed = int(os.environ.get("MINDVL_CHAOS_KILLS", "4")), int(os.environ.get("MINDVL_CHAOS_SEED", "0"))
    settings: dict[str, Any] = {
        "steps": 3 * num_kills,
        "global_batch_size": 4,
        "checkpoints": CheckpointConfig(every_steps=2),
        # Adam's first steps follow the sign of a gradient, so that rounding of nearly zero ones would show: damp them.
        "optimizer": OptimizerConfig(epsilon=1e-4),
    }
    quiet, restless = make_config("quiet", **settings), make_config("restless", **settings)
    job = tmp_path / "job.pickle"
    job.write_bytes(pickle.dumps((quiet, restless, num_kills, seed)))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHAOS), str(job)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    logs = "\n".join(path.read_text()[-1500:] for path in sorted(tmp_path.glob("*.rank*")))
    assert done.returncode == 0, f"{logs}\n{done.stderr[-3000:]}"
    kills = json.loads(done.stdout.splitlines()[-1])
    assert len(kills) == num_kills
    assert all(-signal.SIGKILL in codes for _, _, _, codes in kills), kills

    print(f"kills as [processes, step, killed, exit codes]: {kills}")
    orders = [(config.out / "audit.jsonl").read_text().splitlines() for config in (quiet, restless)]
    assert len(orders[0]) == 3 * num_kills
    assert list(map(_order, orders[0])) == list(map(_order, orders[1]))
    ends = [config.out / "checkpoints" / f"step-{3 * num_kills:08d}" for config in (quiet, restless)]
    assert (ends[0] / "ledger.json").read_bytes() == (ends[1] / "ledger.json").read_bytes()
    for (step, loss, _), (same, expected, _) in zip(read_losses(restless), read_losses(quiet), strict=True):
        assert (step, loss) == (same, pytest.approx(expected, rel=1e-5))
    tensors, actual = read_tensors(ends[0]), read_tensors(ends[1])
    assert tensors.keys() == actual.keys()
    for name, tensor in tensors.items():
        if not name.startswith("optimizer.state.exp_avg"):
            torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-5, msg=name)


def _order(line: str) -> dict[str, Any]:
    """A line of the audit log without the time it was written."""
    fields: dict[str, Any] = json.loads(line)
    return {name: value for name, value in fields.items() if name != "when"}


def test_a_step_without_loss_tokens_has_a_norm_and_no_loss(tmp_path: Path) -> None:
    from mindvl_train.faults.anomalous_steps import AnomalousSteps

    source: Any = None
    state = TrainState([], None, source, losses=[2.5])
    ranks = ParallelState(rank=0, device=torch.device("cpu"))
    silent = StepTotals(grad_norm=0.5, loss_sum=0.0, num_loss_tokens=0, overflowed=False, stop=False)
    assert AnomalousSteps(FaultsConfig(), tmp_path, state, ranks).accepts(silent, torch.zeros(()), [])
    assert (state.norms, state.losses) == ([0.5], [2.5])
