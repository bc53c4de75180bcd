# SPDX-License-Identifier: Apache-2.0
"""Sums over steps become one report, the same in every layout; lost time is put down to what caused it."""

import errno
import json
import math
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3
from mindvl_ops.runtime.ports import reserved_port
from mindvl_train import ModelSection, RunConfig
from mindvl_train.megatron.groups import destroy_groups
from mindvl_train.metrics.metrics import Metrics
from mindvl_train.metrics.pack_counts import RunFacts
from mindvl_train.parallel_state import process_groups
from mindvl_train.state import TrainState
from mindvl_train.step import StepReport

pytestmark = pytest.mark.slow


class Kept:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.closed = False

    def write(self, report: dict[str, Any]) -> None:
        self.reports.append(report)

    def close(self) -> None:
        self.closed = True


def step_of(loss_sum: float, loss_tokens: int) -> StepReport:
    return StepReport(
        loss_sum=torch.tensor(loss_sum),
        num_loss_tokens=loss_tokens,
        grad_norm=0.5,
        learning_rate=0.1,
        num_tokens=100,
    )


def test_the_loss_is_the_mean_over_loss_tokens_since_the_last_report() -> None:
    from mindvl_model import set_up_device

    sink, state = Kept(), TrainState(models=[], optimizer=None, source=None)  # type: ignore[arg-type]
    facts = RunFacts(model=smallest_config(), sources=("pages",), seq_length=96)
    with process_groups(set_up_device(), seed=0) as ranks:
        metrics = Metrics([sink], 2, ranks, facts)
        answers = []
        for state.step, (loss_sum, loss_tokens) in enumerate([(6.0, 2), (4.0, 8), (3.0, 3), (0.0, 0)], start=1):
            answers.append(metrics.add(state, step_of(loss_sum, loss_tokens), report_now=state.step == 3))
            if state.step == 3:
                metrics.add_save(1000.0)
        metrics.close()
    assert answers[:3] == [None, 1.0, 1.0]  # 10 over 10 tokens, 3 over 3
    assert math.isnan(answers[3])  # nothing over nothing
    assert [report["step"] for report in sink.reports] == [2, 3, 4]
    assert [report["loss_tokens"] for report in sink.reports] == [10, 13, 13]
    assert [report["tokens"] for report in sink.reports] == [200, 300, 400]
    assert [report["checkpoint_s"] for report in sink.reports] == [0, 0, 1000]
    assert sink.reports[2]["seconds_per_step"] < 0  # a save is no part of a step
    assert sink.reports[0]["seconds_per_step"] == pytest.approx(100 / sink.reports[0]["tokens_per_s"], rel=1e-6)
    assert (state.loss_tokens, state.tokens, sink.closed) == (13, 400, True)


def test_many_repeated_steps_are_named_with_the_capacity_that_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    from mindvl_model import set_up_device
    from mindvl_model.megatron.expert_messages import ExpertMessages

    sink, state = Kept(), TrainState(models=[], optimizer=None, source=None)  # type: ignore[arg-type]
    facts = RunFacts(model=smallest_config(), sources=("pages",), seq_length=96)
    with process_groups(set_up_device(), seed=0) as ranks:
        metrics = Metrics([sink], 1, ranks, facts)
        metrics._expert_messages = [ExpertMessages(8, 2, 4.0, None), ExpertMessages(8, 2, 4.0, None)]
        for most, repeated, steps in ((9, 1, 100), (7, 3, 100), (5, 3, 101), (5, 4, 101)):
            metrics._expert_messages[1].note_exact([most])
            was_repeated, state.repeated, state.step = repeated > state.repeated, repeated, steps
            metrics.add(state, replace(step_of(6.0, 2), was_repeated=was_repeated), report_now=True)
    found = [(report["expert_capacity_needed"], report["repeated_steps"]) for report in sink.reports]
    assert found == [(2.25, 1), (1.75, 3), (1.25, 3), (1.25, 4)]
    warnings = [record.getMessage() for record in caplog.records if "expert_capacity_factor" in record.getMessage()]
    assert len(warnings) == 2  # more than 2 % of all steps, and new ones
    assert "1 of the last 1 steps were computed twice" in warnings[0]
    assert warnings[0].endswith("Use at least 1.75.")


def test_a_full_disk_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    from mindvl_model import set_up_device

    class Full(Kept):
        def write(self, report: dict[str, Any]) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    after, state = Kept(), TrainState(models=[], optimizer=None, source=None)  # type: ignore[arg-type]
    facts = RunFacts(model=smallest_config(), sources=("pages",), seq_length=96)
    with process_groups(set_up_device(), seed=0) as ranks:
        Metrics([Full(), after], 1, ranks, facts).add(state, step_of(6.0, 2), report_now=True)
    assert len(after.reports) == 1
    assert "a report could not be written" in caplog.text


def test_groups_come_down_so_that_a_process_can_train_again() -> None:
    from megatron.core import parallel_state

    from mindvl_model import set_up_device

    for _ in range(2):
        with process_groups(set_up_device(), seed=0) as ranks:
            assert (ranks.rank, ranks.dp_rank, ranks.dp_size, ranks.is_first) == (0, 0, 1, True)
    assert not parallel_state.model_parallel_is_initialized()
    assert not torch.distributed.is_initialized()
    destroy_groups()  # once more does no harm


# Trains one step from the same weights and packs in a layout, and reports it. In the data-parallel one, then steps in
# which the second rank alone has a slow loader, much text, large images. Its clock counts the processor time of own work,
# the seconds of the slow loader and the time in collectives, because other programs may use the processors too.
WORKER = """
    import json, os, pickle, sys, time
    from dataclasses import replace
    from pathlib import Path
    from types import SimpleNamespace
    import torch
    from mindvl_data import Loader
    from mindvl_model import set_up_device
    from mindvl_model.random_inputs import pack_segments, random_segment
    from mindvl_model.parallel_config import ParallelConfig
    accelerator = set_up_device()
    from mindvl_train.megatron.optimizer import build_optimizer, wrap_models
    from mindvl_train.megatron.pipeline import prepare_schedule
    from mindvl_train.metrics.metrics import Metrics
    from mindvl_train.parallel_state import process_groups
    from mindvl_train.resolved_run import resolve_run, tokenized_model
    from mindvl_train.metrics.run_card import run_facts
    from mindvl_train.state import TrainState
    from mindvl_train.metrics import step_clock
    from mindvl_train.metrics.step_clock import StepClock
    from mindvl_train.step import train_step
    from mindvl_train.weights import build_models

    config = pickle.loads(Path(sys.argv[1]).read_bytes())
    model_config = tokenized_model(config)

    class Kept(list):
        write = list.append

    class Pack:
        def __init__(self, **segment):
            self._inputs = pack_segments([random_segment(model_config, **segment)])
            self.num_loss_tokens = int((self._inputs["labels"] != -100).sum())
            images = len(segment.get("grids", ()))
            self.samples = [SimpleNamespace(source="text", num_images=images, num_videos=0, failed=False)]
        def to(self, device):
            return self
        def model_inputs(self):
            return self._inputs

    class OwnTime:
        waited, depth, since = 0.0, 0, 0.0

        def now(self):
            return time.process_time() + self.waited

        def enter(self, clock, name):
            enter(clock, name)
            self.depth += 1
            if self.depth == 1:
                self.since = time.perf_counter()

        def leave(self, clock):
            self.depth -= 1
            if self.depth == 0:
                self.waited += time.perf_counter() - self.since
            leave(clock)

    own, enter, leave = OwnTime(), StepClock._enter, StepClock._leave
    StepClock._enter = lambda clock, name: own.enter(clock, name)
    StepClock._leave = lambda clock: own.leave(clock)
    step_clock.time = SimpleNamespace(perf_counter=own.now)

    def slow(packs, seconds):
        for pack in packs:
            time.sleep(seconds)  # so that the other rank really waits
            own.waited += seconds
            yield pack

    def steps(parallel):
        with process_groups(accelerator, 0, parallel) as ranks:
            run = replace(resolve_run(replace(config, parallel=parallel), ranks.num_ranks), model=model_config)
            models = wrap_models(build_models(run, ranks.device, load_init=True))
            optimizer = build_optimizer(models, config.optimizer)
            prepare_schedule(models, optimizer)
            state = TrainState(models=models, optimizer=optimizer, source=None)
            kept, walls = Kept(), []
            metrics = Metrics([kept], 1, ranks, run_facts(config, model_config, ranks.device), models)
            for microbatches, number in sources_of(ranks):
                torch.distributed.barrier()
                began = own.now()
                report = train_step(
                    models, optimizer, iter(microbatches), num_microbatches=number, learning_rate=1e-3, ranks=ranks,
                    may_update=lambda *_: True, begin=lambda part: metrics.begin(part, state.step + 1),
                )
                state.step += 1
                metrics.add(state, report, report_now=False)
                walls.append(own.now() - began)
            return [{**report, "wall": wall} for report, wall in zip(kept, walls, strict=True)]

    with Loader(config.data, global_batch_size=2, position_kind="rope") as loader:
        packs = [next(loader) for _ in range(2)]

    def sources_of(ranks):
        yield packs[ranks.dp_rank :: ranks.dp_size], 2 // ranks.dp_size
        if ranks.dp_size == 1:
            return
        small, second = dict(num_text=8), ranks.dp_rank == 1
        yield [Pack(**small)], 1
        yield slow([Pack(**small)], 0.5 * second), 1
        yield [Pack(num_text=2000 if second else 8)], 1
        yield [Pack(num_text=8, grids=[(1, 4, 4)] + [(1, 48, 48)] * second)], 1

    layouts = [ParallelConfig(), ParallelConfig(tp_size=2), ParallelConfig(pp_size=2), ParallelConfig(cp_size=2)]
    reports = []
    for port, parallel in zip(sys.argv[2:], layouts):  # a port for each: the last store may still be going down
        os.environ["MASTER_PORT"] = port
        reports.append(steps(parallel))
    print(json.dumps(reports))
"""


@pytest.fixture(scope="module")
def reports(config_for: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process and what two report, with experts and multi-token prediction."""
    directory = tmp_path_factory.mktemp("metrics")
    model = smallest_deepseek_v3(num_mtp_layers=1)
    job = directory / "job.pickle"
    config = config_for(directory / "run", model=ModelSection(vision=model.vision, language=model.language))
    job.write_bytes(pickle.dumps(config))

    def start(rank: int, world: int, ports: list[str]) -> "subprocess.Popen[str]":
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WORKER), str(job), *ports],
            env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    printed = []
    with ExitStack() as stack:
        ports = [str(stack.enter_context(reserved_port())) for _ in range(5)]
        workers = [start(0, 2, ports[:4]), start(1, 2, ports[:4]), start(0, 1, ports[4:])]
        for worker in workers:
            stack.callback(worker.kill)
        for worker in workers:
            out, err = worker.communicate(timeout=600)
            assert worker.returncode == 0, err[-3000:]
            printed.append(json.loads(out.strip().splitlines()[-1]))
    uneven = [
        {**first, "wall": (first["wall"] + second["wall"]) / 2}
        for first, second in zip(printed[0][0][1:], printed[1][0][1:], strict=True)
    ]
    return {"one": printed[2][0][0], "two": [reports[0] for reports in printed[0]], "uneven": uneven}


@pytest.mark.multi
def test_every_layout_reports_the_same_numbers(reports: dict[str, Any]) -> None:
    one = reports["one"]
    assert one["loss_by_source"].keys() <= {"pages", "photos", "text"}
    assert len(one["loss_by_source"]) > 1
    assert set(one["loss_by_modality"]) == {"text", "image"}
    assert min(one["loss_by_source"].values()) < one["loss"] < max(one["loss_by_source"].values())
    assert set(one["grad_norm_by_part"]) == {"vision", "projector", "language"}
    squares = sum(norm**2 for norm in one["grad_norm_by_part"].values())
    assert squares**0.5 == pytest.approx(one["grad_norm"], rel=1e-6)
    assert sum(one["tokens_by_source"].values()) == one["since_last"]["sample_tokens"]
    assert one["since_last"]["packs"] == 2
    assert 0 < one["packing_efficiency"] <= 1
    assert one["mtp_loss"].keys() == {"1"}
    assert len(one["routers"]["load"]) > 1  # of the decoder and of multi-token prediction
    assert min(one["routers"]["load"].values()) >= 1
    assert len(reports["two"]) == 4
    for other in reports["two"]:
        assert other["since_last"] == one["since_last"]
        assert other["tokens_by_source"] == one["tokens_by_source"]
        for name in ("loss", "grad_norm", "loss_tokens", "tokens", "patches_per_step", "packing_efficiency"):
            assert other[name] == pytest.approx(one[name], rel=1e-4), name
        for group in ("loss_by_source", "loss_by_modality", "grad_norm_by_part", "mtp_loss"):
            assert other[group] == pytest.approx(one[group], rel=1e-4), group
        for name, figures in one["routers"].items():
            assert other["routers"][name] == pytest.approx(figures, rel=1e-4), name


@pytest.mark.multi
def test_lost_time_is_named_and_all_parts_add_up_to_the_step(reports: dict[str, Any]) -> None:
    _, slow, text, images = (report["step_split"] for report in reports["uneven"])
    for report in reports["uneven"]:
        assert (
            sum(report["step_split"].values()) <= report["wall"] + 1e-6
        )  # means over both ranks; it includes the report
        assert min(report["step_split"].values()) >= 0
        assert sum(report["step_split"].values()) > 0.5 * report["wall"]
    assert slow["data_wait"] >= 0.3  # of half a second; the other rank may need more processor time for other things
    lost = ("data_wait", "vision_imbalance", "language_imbalance", "pipeline_bubble", "optimizer", "host")
    assert max(lost, key=lambda name: slow[name]) == "data_wait"
    assert max(lost, key=lambda name: text[name]) == "language_imbalance"
    assert max(lost, key=lambda name: images[name]) == "vision_imbalance"
    assert reports["uneven"][2]["imbalance"]["language"] > 1.9  # nearly all of it is on one of two ranks
    assert reports["uneven"][3]["imbalance"]["vision"] > 1.9
