# SPDX-License-Identifier: Apache-2.0
"""Ranks of a small job, rehearsed for real: their messages match, and planted faults are found and named."""

import os
import shutil
import signal
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from mindvl_data import DataConfig, PackingConfig, SourceConfig
from mindvl_model.parallel_config import ParallelConfig, RecomputeConfig
from mindvl_model.testing.tiny import smallest_qwen3_moe
from mindvl_train import ModelSection, RunConfig, ScheduleConfig, TrainError
from mindvl_train.layout_search.packs import Pack
from mindvl_train.rehearsal.classes import rank_classes
from mindvl_train.rehearsal.deadlocks import find_deadlock
from mindvl_train.rehearsal.job import job_of
from mindvl_train.rehearsal.matching import World, find_mismatches
from mindvl_train.rehearsal.pool import num_parallel, rehearse_ranks
from mindvl_train.rehearsal.verdict import judge
from mindvl_train.resolved_run import resolve_run

pytestmark = pytest.mark.slow

PACK = Pack(segments=(40, 24), grids=((1, 4, 4), (1, 4, 8)))
MODEL = smallest_qwen3_moe()
CONFIG = RunConfig(
    phase="sft",
    out=Path("run"),
    data=DataConfig(
        sources=(SourceConfig(name="none", path="none"),), tokenizer=Path("none"), packing=PackingConfig(seq_length=64)
    ),
    model=ModelSection(vision=MODEL.vision, language=MODEL.language),
    schedule=ScheduleConfig(steps=1, peak_lr=1e-4),
    global_batch_size=4,
    parallel=ParallelConfig(tp_size=2, pp_size=2, ep_size=2),
)


MORE_EXPERTS = ModelSection(
    vision=MODEL.vision,
    language=replace(MODEL.language, experts=replace(MODEL.language.experts, num_experts=16)),
)
# Replaces what a module sends in the process of a rank; Python imports it before anything else.
SKIPS_ALL_REDUCE = """
import importlib.abc, importlib.util, sys

class Plant(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "mindvl_train.step_totals":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.dist = type("Silent", (), {"all_reduce": staticmethod(lambda totals: None)})

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Plant())
"""


def job(rank, config=CONFIG, device="cpu", pack=PACK):
    return job_of(config, recipe="small", device=device, world_size=4, rank=rank, steps=1, pack=pack)


def rehearsed(jobs, place):
    return rehearse_ranks(jobs, at_once=2, log_path=lambda rank: place / f"{rank}.log")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """All four ranks: two ranks, tensor- and expert-parallel, on each of two pipeline stages."""
    return {
        record.rank: record for record in rehearsed([job(rank) for rank in range(4)], tmp_path_factory.mktemp("logs"))
    }


@pytest.fixture(scope="module")
def classes():
    return rank_classes(resolve_run(CONFIG, 4), PACK)


def test_all_messages_of_a_job_match_without_a_deadlock(records, classes):
    world = World(records, classes)
    assert find_mismatches(world) == []
    assert find_deadlock(world) is None
    assert {message.kind for message in records[0].messages} >= {"send", "recv", "all_reduce", "all_gather"}


def test_sends_and_receives_are_awaited(records):
    for record in records.values():
        halves = [message for message in record.messages if message.kind in ("send", "recv")]
        assert all(message.waited_at is not None and message.waited_at > message.index for message in halves)


def test_one_rank_of_each_class_stands_for_the_others(records, classes):
    chosen = {each.representative: records[each.representative] for each in classes}
    world = World(chosen, classes)
    assert find_mismatches(world) == []
    assert find_deadlock(world) is None
    verdict = judge(list(records.values()), classes, memory_bytes=1e9, kind="cpu")
    assert verdict.is_ok


def test_a_rank_that_recomputes_layers_is_found_at_its_first_additional_message(records, classes, tmp_path):
    recomputing = replace(CONFIG, recompute=RecomputeConfig(kind="full"))
    (planted,) = rehearsed([job(1, recomputing)], tmp_path)
    found = find_mismatches(World({0: records[0], 1: planted}, classes))
    assert any("TENSOR_MODEL_PARALLEL_GROUP of ranks 0, 1" in each.group for each in found)
    assert all(".py:" in str(each) for each in found)


@pytest.mark.parametrize(
    ("rank", "changes", "pack", "reason"),
    [
        (1, {"global_batch_size": 8}, PACK, "number of messages"),
        (3, {"trainable": ("vision", "projector")}, PACK, None),
        (3, {"precision": "bf16"}, PACK, "data type"),
        (2, {}, Pack(segments=(40, 32), grids=((1, 4, 4), (1, 4, 8))), "shape"),
        (1, {"model": MORE_EXPERTS}, PACK, "shape"),
    ],
    ids=["microbatches", "frozen-part", "precision", "pack", "experts"],
)
def test_a_rank_with_another_recipe_is_found_and_named(records, classes, rank, changes, pack, reason, tmp_path):
    (planted,) = rehearsed([job(rank, replace(CONFIG, **changes), pack=pack)], tmp_path)
    found = find_mismatches(World({**records, rank: planted}, classes))
    assert found
    assert all(rank in (side.rank for side in each.sides) and ".py:" in str(each) for each in found)
    assert reason in (None, *(each.reason for each in found))


def test_a_collective_that_the_code_of_one_rank_skips_is_named_with_its_line(records, classes, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(SKIPS_ALL_REDUCE)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    )
    (planted,) = rehearsed([job(2)], tmp_path)
    found = find_mismatches(World({**records, 2: planted}, classes))
    assert {tuple(side.rank for side in each.sides) for each in found} == {(0, 2), (1, 2), (2, 3)}
    assert all("default_pg of ranks 0, 1, 2, 3" in str(each) for each in found)
    assert all("all_reduce of float32 [5] at mindvl_train/step_totals.py:" in str(each) for each in found)


def test_a_skipped_all_reduce_is_found(records, classes):
    skipped = next(m for m in records[1].messages if m.kind == "all_reduce" and m.num_elements > 1 and m.step == 0)
    planted = replace(records[1], messages=tuple(m for m in records[1].messages if m is not skipped))
    found = find_mismatches(World({**records, 1: planted}, classes))
    assert found
    assert all(1 in (side.rank for side in each.sides) for each in found)


@pytest.mark.parametrize(("field", "value"), [("shapes", ((3, 5),)), ("dtype", "bfloat16")])
def test_another_shape_or_type_of_one_message_is_found_at_its_place(records, classes, field, value):
    place = next(m.index for m in records[3].messages if m.kind == "all_gather")
    messages = list(records[3].messages)
    messages[place] = replace(messages[place], **{field: value})
    (found,) = find_mismatches(World({**records, 3: replace(records[3], messages=tuple(messages))}, classes))
    assert found.reason == {"shapes": "shape", "dtype": "data type"}[field]
    assert {side.rank for side in found.sides} == {2, 3}


def test_two_groups_in_another_order_on_one_rank_are_a_deadlock(records, classes):
    """Each group alone still matches; only the order between two groups of ranks 0 and 1 differs."""
    messages = list(records[1].messages)
    shared = {key for key, group in records[1].groups.items() if {0, 1} <= set(group.ranks)}
    place = next(
        one.index
        for one, other in pairwise(messages)
        if not (one.is_async or other.is_async) and one.group != other.group and {one.group, other.group} <= shared
    )
    messages[place], messages[place + 1] = (
        replace(messages[place + 1], index=place),
        replace(messages[place], index=place + 1),
    )
    world = World({**records, 1: replace(records[1], messages=tuple(messages))}, classes)
    assert find_mismatches(world) == []
    found = find_deadlock(world)
    assert found is not None
    assert {0, 1} <= {each.rank for each in found.cycle}


def test_planted_faults_of_ranks_on_gpus_are_found(classes, tmp_path):
    if torch.version.cuda is None or shutil.which("cc") is None:
        pytest.skip("needs a CUDA build of torch and a C compiler")
    config = replace(CONFIG, precision="bf16")
    first, second = rehearsed([job(rank, config, "h100") for rank in (0, 1)], tmp_path)
    assert find_mismatches(World({0: first, 1: second}, classes)) == []
    skipped = next(m for m in second.messages if m.kind == "reduce_scatter" and m.step == 0)
    planted = replace(second, messages=tuple(m for m in second.messages if m is not skipped))
    found = find_mismatches(World({0: first, 1: planted}, classes))
    assert any("TENSOR_MODEL_PARALLEL_GROUP of ranks 0, 1" in each.group for each in found)
    # NCCL sends all messages but those of objects and of the data order
    assert {first.groups[m.group].backend for m in first.messages if m.step == 0} <= {"nccl", "gloo"}
    assert {first.groups[m.group].backend for m in first.messages if m.dtype == "bfloat16"} == {"nccl"}


def test_a_rank_that_fails_stops_the_others_and_its_log_stays(tmp_path):
    broken = replace(CONFIG, model=replace(CONFIG.model, language=replace(MODEL.language, vocab_size=6)))
    with pytest.raises(TrainError, match=r"the rehearsal failed with exit code 1: .*Error: random_ .*[01]\.log names"):
        rehearsed([job(rank, broken) for rank in range(2)], tmp_path)
    assert list(tmp_path.glob("*.log"))


def test_an_interrupted_rehearsal_leaves_neither_processes_nor_logs(tmp_path):
    def interrupt(shares):
        if shares:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rehearse_ranks(
            [job(0), job(1)], at_once=2, log_path=lambda rank: tmp_path / f"{rank}.log", on_progress=interrupt
        )
    assert not list(tmp_path.iterdir())
    assert _processes_of_ranks() == []


def test_a_killed_rank_is_named_with_its_signal(tmp_path):
    def kill(shares):
        for process in _processes_of_ranks():
            os.kill(process, signal.SIGKILL)

    with pytest.raises(
        TrainError, match=r"small: rank 0 of 4 on cpu: the rehearsal was ended by SIGKILL, perhaps because"
    ):
        rehearse_ranks([job(0)], at_once=1, log_path=lambda rank: tmp_path / f"{rank}.log", on_progress=kill)


def _processes_of_ranks():
    """Running rehearsals that this process started."""
    found = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").read_text().split()
    return [
        int(child) for child in found if "mindvl_train.rehearsal.process" in Path(f"/proc/{child}/cmdline").read_text()
    ]


@pytest.mark.parametrize(("cores", "memory", "processes"), [(2, 16e9, 2), (64, 16e9, 8), (4, 1e9, 1)])
def test_as_many_processes_run_as_cores_and_memory_allow(cores, memory, processes):
    assert num_parallel(cores, memory) == processes
