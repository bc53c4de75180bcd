# SPDX-License-Identifier: Apache-2.0
"""Audit log: each step once and in order, through kills and restarts; marks where the run was branched or the data changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindvl_data import DataConfig, DataError, Loader
from mindvl_data.audit_lines import count_lines, read_log
from mindvl_data.tracker import saved_order

MakeConfig = Callable[..., DataConfig]


def state_after(config: DataConfig, packs: int = 4) -> dict[str, Any]:
    with Loader(config, global_batch_size=2, position_kind="rope") as loader:
        for _ in range(packs):
            next(loader)
        return loader.state_dict()


def without_time(log: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        assert line.pop("when").endswith("Z")
    return lines


def test_the_audit_log_lists_every_sample_of_every_complete_step(make_config: MakeConfig, tmp_path: Path) -> None:
    log = tmp_path / "runs" / "audit.jsonl"
    config = make_config(audit_log=log)
    with Loader(config, global_batch_size=2, position_kind="rope") as loader:
        batches = [next(loader) for _ in range(5)]  # the third step is not complete
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    logged = [tuple(sample) for line in lines for pack in line["packs"] for sample in pack]
    assert logged == [(s.source, s.epoch, s.shard, s.sample_index) for batch in batches[:4] for s in batch.samples]
    lengths = [segment.length for batch in batches[:4] for segment in batch.samples]
    assert sum(sum(line["tokens"].values()) for line in lines) == sum(lengths)
    read = list(read_log(log))
    assert [(line.step, line.kind, line.packs) for line in read] == [
        (k, "packs", lines[k - 1]["packs"]) for k in (1, 2)
    ]


def logged_steps(log: Path) -> list[int]:
    return [json.loads(line)["step"] for line in log.read_text().splitlines()]


def test_a_resumed_run_has_each_step_once_in_the_audit_log(make_config: MakeConfig, tmp_path: Path) -> None:
    log, whole = tmp_path / "audit.jsonl", tmp_path / "whole.jsonl"
    state_after(make_config(audit_log=whole), packs=12)
    state = state_after(make_config(audit_log=log), packs=4)
    with Loader(make_config(audit_log=log), global_batch_size=2, position_kind="rope") as loader:
        loader.load_state_dict(state)
        for _ in range(4):
            next(loader)
    assert logged_steps(log) == [1, 2, 3, 4]
    with open(log, "ab") as file:
        file.write(b'{"step":5,"packs":[[["pic')  # the kill
    with Loader(make_config(audit_log=log), global_batch_size=2, position_kind="rope") as loader:
        loader.load_state_dict(state)  # the checkpoint is two steps older than the log
        assert logged_steps(log) == [1, 2]
        for _ in range(8):
            next(loader)
    assert without_time(log) == without_time(whole)


def test_a_run_without_a_checkpoint_starts_its_audit_log_anew(make_config: MakeConfig, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    state_after(make_config(audit_log=log), packs=6)
    with Loader(make_config(audit_log=log), global_batch_size=2, position_kind="rope") as loader:
        assert logged_steps(log) == [1, 2, 3]  # a checkpoint may still be restored
        next(loader), next(loader)
    assert logged_steps(log) == [1]


def start_anew(config: DataConfig) -> None:
    with Loader(config, global_batch_size=2, position_kind="rope") as loader:
        next(loader), next(loader)


def test_a_run_that_starts_anew_does_not_erase_the_steps_of_another(make_config: MakeConfig, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    state_after(make_config(audit_log=log), packs=6)
    logged = log.read_text()
    for _ in range(2):
        with pytest.raises(DataError, match=r"audit\.jsonl: the audit log holds steps of another run.*Resume.*remove"):
            start_anew(make_config(audit_log=log, seed=99))
    assert log.read_text() == logged
    first, rest = logged.split("\n", 1)
    older = json.dumps({key: value for key, value in json.loads(first).items() if key != "order_id"})
    log.write_text(older.replace(" ", "") + "\n" + rest)  # without the hash of the identities
    with pytest.raises(DataError, match="holds steps of another run"):
        start_anew(make_config(audit_log=log))
    log.write_text('{"step":1,"packs":[[["pic')  # no step is lost with this
    start_anew(make_config(audit_log=log, seed=99))
    assert logged_steps(log) == [1]


def test_a_log_with_marks_is_not_erased_even_by_a_run_with_the_same_order(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    log = tmp_path / "audit.jsonl"
    state_after(make_config(audit_log=log), packs=2)
    mark = {"step": 1, "change": {"who": "me@here"}, "order": {}, "sources": [], "when": "2026-01-01T00:00:00Z"}
    with open(log, "a") as file:
        file.write(json.dumps(mark, separators=(",", ":")) + "\n")
    with pytest.raises(DataError, match="holds steps of another run"):
        start_anew(make_config(audit_log=log))
    assert count_lines(log) == (1, 1)


def test_opening_a_log_that_another_loader_writes_changes_nothing_and_writing_is_refused(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    log = tmp_path / "audit.jsonl"
    config = make_config(audit_log=log, num_threads=0)
    with Loader(config, global_batch_size=2, position_kind="rope") as loader:
        next(loader), next(loader)
        state = loader.state_dict()
        with open(log, "ab") as file:
            file.write(b'{"step":2,"ro')  # being written
        live = log.read_bytes()
        with Loader(config, global_batch_size=2, position_kind="rope") as second:
            assert log.read_bytes() == live
            with pytest.raises(
                DataError, match=r"audit\.jsonl: the audit log is being written by another loader.*set another"
            ):
                next(second), next(second)
            with pytest.raises(DataError, match="being written by another loader"):
                second.load_state_dict(state)
        assert log.read_bytes() == live
    with Loader(config, global_batch_size=2, position_kind="rope") as third:
        third.load_state_dict(state)
        assert logged_steps(log) == [1]


def test_only_the_first_data_parallel_rank_logs(make_config: MakeConfig, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    with Loader(make_config(audit_log=log), global_batch_size=2, dp_rank=1, dp_size=2, position_kind="rope") as loader:
        next(loader)
    assert not log.exists()


def test_a_file_that_is_no_audit_log_is_not_shortened(make_config: MakeConfig, tmp_path: Path) -> None:
    log = tmp_path / "notes.txt"
    log.write_text("mine")
    with pytest.raises(DataError, match=r"notes\.txt:1: the line is not part of an audit log"):
        state_after(make_config(audit_log=log))
    assert log.read_text() == "mine"


def test_a_run_that_continues_in_a_new_log_says_which_steps_are_elsewhere(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    state = state_after(make_config(), packs=6)
    log = tmp_path / "branch.jsonl"
    for _ in range(2):  # the second time over its own log: the mark stands there once
        with Loader(make_config(audit_log=log), global_batch_size=2, position_kind="rope") as loader:
            loader.load_state_dict(state)
            next(loader), next(loader)
        lines = list(read_log(log))
        assert [(line.step, line.kind) for line in lines] == [(3, "branch"), (4, "packs")]
        assert lines[0].order == saved_order(state)
        assert count_lines(log) == (1, 1)


def test_a_log_that_cannot_be_written_loses_no_pack_and_no_step(make_config: MakeConfig) -> None:
    full = make_config(audit_log=Path("/dev/full"), num_threads=0)
    with Loader(make_config(num_threads=0), global_batch_size=1, position_kind="rope") as loader:
        first = next(loader)
    with Loader(full, global_batch_size=1, position_kind="rope") as loader:
        for _ in range(2):
            with pytest.raises(DataError, match=r"/dev/full: the audit log cannot be written: No space left.*another"):
                next(loader)
            assert loader._state["step"] == 0
        loader._audit = None  # there is room again
        assert next(loader).samples == first.samples
        assert loader._state["step"] == 1


def test_a_state_that_the_log_cannot_continue_from_changes_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    with Loader(make_config(), global_batch_size=2, position_kind="rope") as loader:
        expected = [next(loader).samples for _ in range(7)]
    with Loader(make_config(audit_log=log), global_batch_size=2, position_kind="rope") as loader:
        for _ in range(2):
            next(loader)
        state = loader.state_dict()
        assert [next(loader).samples for _ in range(3)] == expected[2:5]
        with open(log, "a") as file:
            file.write("mine\n")
        with pytest.raises(DataError, match=r"audit\.jsonl:3: the line is not part of an audit log"):
            loader.load_state_dict(state)
        assert loader._state["step"] == 2
        assert [next(loader).samples for _ in range(2)] == expected[5:]
