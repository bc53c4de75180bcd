# SPDX-License-Identifier: Apache-2.0
"""Ledger: what was consumed is what was planned, through kills and other numbers of ranks; what is not, shows."""

import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindvl_data import Batch, DataConfig, DataError, Loader, PackingConfig, index_directory
from mindvl_data.audit_lines import read_log
from mindvl_data.ledger import consumed, verify
from mindvl_data.shards.atomic import write_atomically

pytestmark = pytest.mark.slow

MakeConfig = Callable[..., DataConfig]
Sealed = dict[str, Any]

PACKS = 30  # of a step: can be distributed over 2, 3 and 5 ranks
STEPS = 6


def digest(batch: Batch) -> str:
    tensors = (batch.input_ids, batch.labels, batch.position_ids, batch.pixel_values, batch.image_grid_thw)
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def train(config: DataConfig, directory: Path, rank: int, size: int, synced: Any, reported: int, run: int) -> None:
    """One process of a run: packs, a meeting in place of the optimizer's, sometimes a checkpoint."""
    state = directory / "state.json"
    mine = os.open(directory / f"packs-{run}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Loader(config, global_batch_size=PACKS, dp_rank=rank, dp_size=size, position_kind="rope") as loader:
        if state.exists():
            loader.load_state_dict(json.loads(state.read_text()))
        step = loader.report()["steps"]
        while step < STEPS:
            for number in range(PACKS // size):
                batch = next(loader)
                os.write(mine, f"{batch.step} {number * size + rank} {digest(batch)}\n".encode())
                os.write(reported, b".")
            synced.wait(300)
            step += 1
            if rank == 0 and step % 2 == 0:
                write_atomically(state, json.dumps(loader.state_dict()).encode())
            synced.wait(300)


def run_until_killed(config: DataConfig, directory: Path, size: int, run: int, packs: int | None) -> None:
    """Start `size` processes and kill all of them once `packs` packs were handed out; None: let them finish."""
    context = multiprocessing.get_context("fork")
    read_end, write_end = os.pipe()
    synced = context.Barrier(size)
    ranks = [
        context.Process(target=train, args=(config, directory, rank, size, synced, write_end, run))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    os.close(write_end)
    seen = 0
    while (packs is None or seen < packs) and (reported := os.read(read_end, 1)):
        seen += len(reported)
    for process in ranks:
        if packs is not None and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    os.close(read_end)
    assert {process.exitcode for process in ranks} == {0 if packs is None else -signal.SIGKILL}


@pytest.mark.parametrize(("seed", "balance_steps"), [(1, 1), (2, 4)])
def test_kills_at_any_moment_and_2_then_3_then_5_ranks_lose_and_repeat_nothing(
    make_config: MakeConfig, tmp_path: Path, seed: int, balance_steps: int
) -> None:
    choose = random.Random(seed)
    packing = PackingConfig(seq_length=256, buffer_size=16, balance_steps=balance_steps)
    config = make_config(audit_log=tmp_path / "audit.jsonl", prefetch_packs=3, order_ahead_steps=2, packing=packing)
    with Loader(
        replace(config, audit_log=None, num_threads=0), global_batch_size=PACKS, position_kind="rope"
    ) as loader:
        expected = {(number // PACKS + 1, number % PACKS): digest(next(loader)) for number in range(STEPS * PACKS)}
    sizes = [2, 3, 5]
    for run, size in enumerate(sizes):
        run_until_killed(config, tmp_path, size, run, packs=choose.randint(30, 60))
    run_until_killed(config, tmp_path, choose.choice(sizes), len(sizes), packs=None)

    handed_out: dict[tuple[int, int], set[str]] = {}
    for file in tmp_path.glob("packs-*"):
        for line in file.read_text().splitlines():
            step, place, found = line.split()
            handed_out.setdefault((int(step), int(place)), set()).add(found)
    assert handed_out == {place: {found} for place, found in expected.items()}
    state = json.loads((tmp_path / "state.json").read_text())
    report = verify(config, tmp_path / "audit.jsonl", global_batch_size=PACKS, state=state)
    assert report["verified"]["problems"] == []
    assert report["verified"]["notes"] == []
    assert (report["steps"], report["verified"]["steps"], report["checkpoint_step"]) == (STEPS, STEPS, STEPS)
    assert report["verified"]["finished_epochs"]["images"] >= 4


def run(
    config: DataConfig, num_packs: int | None, *, packs: int = 2, state: Sealed | None = None, who: str = ""
) -> Sealed:
    with Loader(config, global_batch_size=packs, position_kind="rope") as loader:
        if state is not None:
            loader.load_state_dict(state, accept_change=who or None)
        for count, _ in enumerate(loader, 1):
            if count == num_packs:
                break
        return json.loads(json.dumps(loader.state_dict()))  # type: ignore[no-any-return]


@pytest.fixture
def finished(make_config: MakeConfig, tmp_path: Path) -> tuple[DataConfig, Path, Sealed]:
    """A run over two epochs to the end: its configuration, log and state."""
    log = tmp_path / "audit.jsonl"
    config = make_config(max_epochs=2, audit_log=log, num_threads=0)
    return config, log, run(config, None)


def problems(config: DataConfig, log: Path, state: Sealed | None = None) -> list[str]:
    found: list[str] = verify(config, log, global_batch_size=2, state=state)["verified"]["problems"]
    return found


def test_what_was_consumed_is_counted_by_source(finished: tuple[DataConfig, Path, Sealed]) -> None:
    config, log, state = finished
    report = verify(config, log, global_batch_size=2, state=state)
    assert report["samples"] == 200
    assert {name: figures["samples"] for name, figures in report["sources"].items()} == {"images": 120, "text": 80}
    assert {figures["epochs_begun"] for figures in report["sources"].values()} == {2}
    assert report["verified"]["finished_epochs"] == {"images": 2, "text": 2}
    assert report["verified"]["problems"] == []
    with Loader(replace(config, audit_log=None), global_batch_size=2, position_kind="rope") as loader:
        lengths: Counter[str] = Counter()
        for batch in loader:
            for segment in batch.samples:
                lengths[segment.source] += segment.length
    assert {name: figures["tokens"] for name, figures in report["sources"].items()} == lengths
    assert consumed(log, state=state) == {name: value for name, value in report.items() if name != "verified"}
    assert report["began"] <= report["ended"]


def test_dropped_samples_are_no_part_of_a_whole_epoch(make_config: MakeConfig, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    config = make_config(max_epochs=1, audit_log=log, packing=PackingConfig(seq_length=40, buffer_size=8))
    state = run(config, None)
    report = verify(config, log, global_batch_size=2, state=state)
    assert report["verified"]["problems"] == []
    assert report["verified"]["finished_epochs"] == {"images": 1, "text": 1}
    assert report["samples"] + sum(report["dropped"].values()) == 100
    assert report["dropped"]


def change_lines(log: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    change(lines)
    log.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def use_again(lines: list[dict[str, Any]]) -> None:
    lines[3]["packs"][0][0] = lines[1]["packs"][0][0]


def swap_steps(lines: list[dict[str, Any]]) -> None:
    lines[2]["packs"], lines[3]["packs"] = lines[3]["packs"], lines[2]["packs"]


def lose_a_sample(lines: list[dict[str, Any]]) -> None:
    lines[4]["packs"][1].pop()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines.pop(2), "step 3 is missing, the log continues with step 4"),
        (lambda lines: lines.insert(2, lines[1]), "step 2 follows 2, the log continues with step 2"),
        (use_again, r"step 4: .* was used before in epoch 0"),
        (swap_steps, r"step 3: pack 0 has .* as sample 0, the data order has .*"),
        (lose_a_sample, r"step 5: pack 1 has nothing as sample \d+, the data order has .*"),
        (lambda lines: lines[1]["tokens"].update(text=1), r"step 2: tokens .* are logged, the data order has .*"),
        (lambda lines: lines.pop(), r"steps (\d+) to \1 of the checkpoint are not in the log"),
        (
            lose_a_sample,
            r"epoch \d of \w+: 1 usable samples are missing, 0 are not usable, the first is shard-.* sample \d+",
        ),
    ],
)
def test_what_is_not_as_planned_is_named(
    finished: tuple[DataConfig, Path, Sealed], change: Callable[[list[dict[str, Any]]], None], message: str
) -> None:
    config, log, state = finished
    assert problems(config, log, state) == []
    change_lines(log, change)
    found = problems(config, log, state)
    assert any(re.fullmatch(f"{message}.*", problem) for problem in found), found


def test_another_configuration_or_checkpoint_does_not_fit_the_log(finished: tuple[DataConfig, Path, Sealed]) -> None:
    config, log, state = finished
    other = replace(config, seed=4)
    assert any("seed (3 -> 4) changed" in problem for problem in problems(other, log, state))
    assert problems(other, log)[0].startswith("step 1: ")
    elsewhere = run(replace(other, audit_log=None), num_packs=10)
    found = problems(config, log, elsewhere)
    assert any("the newest checkpoint is at another position of the data order" in problem for problem in found)


def test_a_log_ahead_of_the_newest_checkpoint_is_no_problem_but_is_reported(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    log = tmp_path / "audit.jsonl"
    config = make_config(audit_log=log)
    with Loader(config, global_batch_size=2, position_kind="rope") as loader:
        for _ in range(6):
            next(loader)
        state = loader.state_dict()
        for _ in range(4):
            next(loader)
    report = verify(config, log, global_batch_size=2, state=state)
    assert report["verified"]["problems"] == []
    assert "the log is 2 steps ahead of the newest checkpoint" in report["verified"]["notes"][0]
    assert (report["last_step"], report["checkpoint_step"], report["steps_after_checkpoint"]) == (5, 3, 2)


@pytest.fixture
def branch(make_config: MakeConfig, tmp_path: Path) -> tuple[DataConfig, Path, Path, Sealed]:
    """A run of 100 steps branched off after step 20 of another: configuration, its log, the parent's, state."""
    parent, log = tmp_path / "parent" / "audit.jsonl", tmp_path / "child" / "audit.jsonl"
    state = run(make_config(audit_log=parent), num_packs=40)
    run(make_config(audit_log=parent), num_packs=20, state=state)  # the parent runs on
    config = make_config(audit_log=log)
    with Loader(config, global_batch_size=2, position_kind="rope") as loader:
        loader.load_state_dict(state, parent_log=parent)
        for _ in range(200):
            next(loader)
        return config, log, parent, json.loads(json.dumps(loader.state_dict()))


def test_a_branched_run_is_held_against_the_plan_through_the_log_of_its_parent(
    branch: tuple[DataConfig, Path, Path, Sealed], tmp_path: Path
) -> None:
    config, log, _, state = branch
    report = verify(config, log, global_batch_size=2, state=state)
    assert report["verified"]["problems"] == []
    assert report["verified"]["steps"] == report["steps"] == 120
    assert report["first_step"] == 1
    assert report["verified"]["samples"] == report["samples"] == state["order"]["totals"]["samples"]
    assert report["verified"]["notes"] == ["steps 1 to 20 were read from the log of the parent of this run"]
    assert report["verified"]["finished_epochs"]["images"] > 2
    shutil.move(tmp_path, tmp_path.with_name("moved"))  # both together
    moved = tmp_path.with_name("moved")
    assert problems(config, moved / "child" / "audit.jsonl", state) == []
    (moved / "parent" / "audit.jsonl").rename(moved / "elsewhere.jsonl")
    elsewhere = {"global_batch_size": 2, "state": state, "parent_log": moved / "elsewhere.jsonl"}
    assert verify(config, moved / "child" / "audit.jsonl", **elsewhere)["verified"]["problems"] == []


def forget_parent(mark: dict[str, Any]) -> None:
    del mark["parent"]


def forge_parent(mark: dict[str, Any]) -> None:
    mark["parent"] = "nowhere.jsonl"


def forge_plan(mark: dict[str, Any]) -> None:
    mark["order"]["drawn_at"][0] = [0, 3]


def forge_own_log(mark: dict[str, Any]) -> None:
    mark["parent"] = "audit.jsonl"


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (forget_parent, r"audit\.jsonl:1: the branch names no parent log with steps 1 to 20"),
        (
            forge_parent,
            r"audit\.jsonl:1: steps 1 to 20 are in the parent's log, which cannot be read: .*does not exist",
        ),
        (forge_plan, r"step 21: pack 0 has "),
        (forge_own_log, r"audit\.jsonl:1: the branch names no parent"),
    ],
)
def test_a_branch_that_cannot_be_followed_is_no_proof(
    branch: tuple[DataConfig, Path, Path, Sealed], forge: Callable[[dict[str, Any]], None], message: str
) -> None:
    config, log, _, state = branch
    change_lines(log, lambda lines: forge(lines[0]))
    assert any(re.search(message, problem) for problem in problems(config, log, state)), problems(config, log, state)


def test_a_deleted_log_is_no_branch(finished: tuple[DataConfig, Path, Sealed], make_config: MakeConfig) -> None:
    config, log, _ = finished
    log.unlink()
    state = run(config, num_packs=20)
    log.unlink()
    with Loader(config, global_batch_size=2, position_kind="rope") as loader:
        loader.load_state_dict(state, parent_log=log)  # as the trainer says of a checkpoint of this very run
        for _ in range(20):
            next(loader)
        state = json.loads(json.dumps(loader.state_dict()))
    found = problems(config, log, state)
    assert any("the branch names no parent log with steps 1 to 10" in one for one in found)


def test_a_log_without_its_end_is_found_although_the_run_went_on(make_config: MakeConfig, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    config = make_config(audit_log=log)
    state = run(config, num_packs=20)
    change_lines(log, lambda lines: lines.pop())  # lost with the machine, as the checkpoint was not
    state = run(config, num_packs=10, state=state)
    report = verify(config, log, global_batch_size=2, state=state)
    assert report["verified"]["problems"] == [f"{log}:10: steps 10 to 10 are missing"]


@pytest.fixture
def changing(shard_directories: dict[str, Path], make_config: MakeConfig, tmp_path: Path) -> tuple[DataConfig, Path]:
    """A configuration whose images lie in a directory of the test's own, and its log."""
    shutil.copytree(shard_directories["images"], tmp_path / "images")
    config = make_config(audit_log=tmp_path / "audit.jsonl", num_threads=0)
    sources = (replace(config.sources[0], path=tmp_path / "images"), config.sources[1])
    return replace(config, sources=sources), tmp_path / "audit.jsonl"


def lose_a_shard(directory: Path) -> None:
    for file in [*directory.glob("shard-000001.*"), directory / "manifest.json"]:
        file.unlink()
    index_directory(directory)


def test_changed_data_continue_once_accepted_and_the_log_says_who_and_what(changing: tuple[DataConfig, Path]) -> None:
    config, log = changing
    state = run(config, num_packs=20)
    lose_a_shard(config.sources[0].path)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"^checkpoint: index of images changed .*--accept-data-change"):
        run(config, num_packs=2, state=state)
    for _ in range(2):  # a crash right after it: accepted again, logged once
        changed = run(config, num_packs=200, state=state, who="me@here")
    (change,) = changed["changes"]
    assert (change["step"], change["who"], list(change["sources"])) == (10, "me@here", ["images"])
    old, new = change["sources"]["images"]
    assert (old, new) == (state["identities"]["index of images"], changed["identities"]["index of images"])
    marks = [line for line in read_log(log) if line.kind != "packs"]
    assert [(line.step, line.kind, line.change) for line in marks] == [(10, "change", change)]
    after = [use for line in read_log(log) if line.step > 10 for pack in line.packs for use in pack]
    begun = max(use[1] for line in read_log(log) if line.step <= 10 for pack in line.packs for use in pack)
    assert min(use[1] for use in after if use[0] == "images") == begun + 1
    assert not [use for use in after if use[:1] + use[2:3] == ["images", "shard-000001.tar"]]
    assert changed["order"]["dropped"]["images: data changed"] > 0

    report = verify(config, log, global_batch_size=2, state=changed)
    assert report["verified"]["problems"] == []
    assert report["verified"]["steps"] == 100
    assert report["verified"]["finished_epochs"]["images"] >= 2
    assert report["changes"] == [change]
    assert "data of images changed after step 10, accepted by me@here" in report["verified"]["notes"][0]
    again = run(config, num_packs=2, state=changed)  # needs no further acceptance
    assert again["changes"] == [change]


def test_a_crash_before_the_first_checkpoint_of_changed_data_is_understood(changing: tuple[DataConfig, Path]) -> None:
    config, log = changing
    state = run(config, num_packs=20)
    lose_a_shard(config.sources[0].path)  # type: ignore[arg-type]
    run(config, num_packs=10, state=state, who="me@here")
    report = verify(config, log, global_batch_size=2, state=state)
    assert report["verified"]["problems"] == []
    assert "the newest checkpoint was written before the data changed" in report["verified"]["notes"]


def test_sources_come_and_go_between_restarts(make_config: MakeConfig, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    both = make_config(audit_log=log, num_threads=0)
    alone = replace(both, sources=both.sources[:1])
    state = run(alone, num_packs=20)
    with pytest.raises(DataError, match=r"source text \(added\)"):
        run(both, num_packs=2, state=state)
    state = run(both, num_packs=100, state=state, who="me@here")
    state = run(replace(both, sources=both.sources[1:]), num_packs=100, state=state, who="you@there")
    assert [(change["step"], list(change["sources"])) for change in state["changes"]] == [
        (10, ["text"]),
        (60, ["images"]),
    ]
    report = verify(replace(both, sources=both.sources[1:]), log, global_batch_size=2, state=state)
    assert report["verified"]["problems"] == []
    assert (report["steps"], report["verified"]["steps"]) == (110, 50)
    (problem, *_) = problems(both, log)
    assert "continued with the sources text, but this configuration has images text" in problem
    assert set(report["sources"]) == {"images", "text"}


def test_reading_needs_no_thread_and_no_more_than_a_file(tmp_path: Path) -> None:
    before = threading.enumerate()
    with pytest.raises(DataError, match="does not exist"):
        consumed(tmp_path / "audit.jsonl")
    (tmp_path / "audit.jsonl").write_text("")
    report = consumed(tmp_path / "audit.jsonl")
    assert (report["steps"], report["samples"], report["sources"], report["began"]) == (0, 0, {}, None)
    assert [thread for thread in threading.enumerate() if thread not in before] == []
    assert list(read_log(tmp_path / "audit.jsonl")) == []
