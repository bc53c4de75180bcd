# SPDX-License-Identifier: Apache-2.0
"""Tracker: a state is refused by name when something changed, and the log says what was consumed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindvl_data import DataConfig, DataError, ImageConfig, Loader, PackingConfig
from mindvl_data.tracker import open_state, seal_state

MakeConfig = Callable[..., DataConfig]


def state_after(config: DataConfig, rows: int = 4) -> dict[str, Any]:
    with Loader(config, packs_per_step=2, position_kind="rope") as loader:
        for _ in range(rows):
            next(loader)
        return loader.state_dict()


def restore(config: DataConfig, state: dict[str, Any], packs_per_step: int = 2) -> None:
    with Loader(config, packs_per_step=packs_per_step, position_kind="rope") as loader:
        loader.load_state_dict(state)


def test_a_state_is_small_json_and_does_not_name_folders(make_config: MakeConfig) -> None:
    text = json.dumps(state_after(make_config()))
    assert len(text) < 4000
    assert str(make_config().tokenizer) not in text


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"seed": 9}, "recipe"),
        ({"text_share": 0.5}, "recipe"),
        ({"packing": PackingConfig(seq_length=128, buffer_size=16)}, "recipe"),
        ({"image": ImageConfig(max_pixels=56 * 56)}, "image and video processor"),
    ],
)
def test_a_changed_recipe_or_processor_is_refused_by_name(
    make_config: MakeConfig, changes: dict[str, Any], name: str
) -> None:
    with pytest.raises(DataError, match=f"{name} changed since the checkpoint"):
        restore(make_config(**changes), state_after(make_config()))


def test_another_number_of_rows_in_a_step_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(DataError, match="recipe changed"):
        restore(make_config(), state_after(make_config()), packs_per_step=4)


def test_another_index_is_refused_by_the_name_of_its_source(
    make_config: MakeConfig, shard_folders: dict[str, Path]
) -> None:
    config = make_config()
    swapped = replace(config, sources=(replace(config.sources[0], path=shard_folders["text"]), config.sources[1]))
    with pytest.raises(DataError, match="index of pictures changed"):
        restore(swapped, state_after(config))


def test_speed_settings_and_moved_folders_may_change(
    make_config: MakeConfig, shard_folders: dict[str, Path], tmp_path: Path
) -> None:
    config = make_config()
    moved = tmp_path / "elsewhere"
    moved.symlink_to(shard_folders["pictures"])
    elsewhere = replace(config, num_threads=0, prefetch_packs=3)
    elsewhere = replace(elsewhere, sources=(replace(config.sources[0], path=moved), config.sources[1]))
    restore(elsewhere, state_after(config))


def test_a_damaged_or_foreign_state_is_refused() -> None:
    sealed = seal_state({"step": 1}, {"recipe": "a"})
    assert open_state(sealed, {"recipe": "a"}) == {"step": 1}
    with pytest.raises(DataError, match="checksum is wrong"):
        open_state(sealed | {"plan": {"step": 2}}, {"recipe": "a"})
    with pytest.raises(DataError, match="version 7"):
        open_state(sealed | {"version": 7}, {"recipe": "a"})


def test_the_audit_log_lists_every_sample_of_every_complete_step(make_config: MakeConfig, tmp_path: Path) -> None:
    log = tmp_path / "runs" / "audit.jsonl"
    config = make_config(audit_log=log)
    with Loader(config, packs_per_step=2, position_kind="rope") as loader:
        batches = [next(loader) for _ in range(5)]  # the third step is not complete
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    logged = [tuple(sample) for line in lines for row in line["rows"] for sample in row]
    assert logged == [(s.source, s.epoch, s.shard, s.row) for batch in batches[:4] for s in batch.segments]


def logged_steps(log: Path) -> list[int]:
    return [json.loads(line)["step"] for line in log.read_text().splitlines()]


def test_a_resumed_run_has_each_step_once_in_the_audit_log(make_config: MakeConfig, tmp_path: Path) -> None:
    log, whole = tmp_path / "audit.jsonl", tmp_path / "whole.jsonl"
    state_after(make_config(audit_log=whole), rows=12)
    state = state_after(make_config(audit_log=log), rows=4)
    with Loader(make_config(audit_log=log), packs_per_step=2, position_kind="rope") as loader:
        loader.load_state_dict(state)
        for _ in range(4):
            next(loader)
    assert logged_steps(log) == [1, 2, 3, 4]
    with open(log, "ab") as file:
        file.write(b'{"step":5,"rows":[[["pic')  # the kill
    with Loader(make_config(audit_log=log), packs_per_step=2, position_kind="rope") as loader:
        loader.load_state_dict(state)  # the checkpoint is two steps older than the log
        assert logged_steps(log) == [1, 2]
        for _ in range(8):
            next(loader)
    assert log.read_bytes() == whole.read_bytes()


def test_a_run_without_a_checkpoint_starts_its_audit_log_anew(make_config: MakeConfig, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    state_after(make_config(audit_log=log), rows=6)
    with Loader(make_config(audit_log=log), packs_per_step=2, position_kind="rope") as loader:
        assert logged_steps(log) == [1, 2, 3]  # a checkpoint may still be restored
        next(loader), next(loader)
    assert logged_steps(log) == [1]


def test_only_the_first_data_parallel_rank_logs(make_config: MakeConfig, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    with Loader(make_config(audit_log=log), packs_per_step=2, dp_rank=1, dp_size=2, position_kind="rope") as loader:
        next(loader)
    assert not log.exists()


def test_a_file_that_is_no_audit_log_is_not_shortened(make_config: MakeConfig, tmp_path: Path) -> None:
    log = tmp_path / "notes.txt"
    log.write_text("mine")
    with pytest.raises(DataError, match=r"no step of an audit log.*notes\.txt at byte 0"):
        state_after(make_config(audit_log=log))
    assert log.read_text() == "mine"
