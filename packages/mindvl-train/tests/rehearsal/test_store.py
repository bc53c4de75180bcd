# SPDX-License-Identifier: Apache-2.0
"""Rehearsals are found for the same recipe, device and number of processes only."""

import json
from dataclasses import replace

import pytest

from mindvl_data import DataConfig, PackingConfig, SourceConfig
from mindvl_model.parallel_config import ParallelConfig, RecomputeConfig
from mindvl_train import ModelSection, RunConfig, ScheduleConfig
from mindvl_train.dry_run import dry_run
from mindvl_train.rehearsal.job import job_of, versions
from mindvl_train.rehearsal.store import (
    SUMMARY,
    directory_of,
    expected_s,
    find_rehearsals,
    log_path,
    record_path,
    remove_others,
    trace_path,
)
from mindvl_train.resolved_run import resolve_run


@pytest.fixture
def config(tmp_path):
    return RunConfig(
        phase="sft",
        out=tmp_path / "run",
        data=DataConfig(
            sources=(SourceConfig(name="a", path=tmp_path / "a"),),
            tokenizer=tmp_path / "t",
            packing=PackingConfig(seq_length=256),
        ),
        model=ModelSection(size="tiny"),
        schedule=ScheduleConfig(steps=1, peak_lr=1e-3),
        global_batch_size=8,
        parallel=ParallelConfig(pp_size=2),
    )


def write_rehearsal(config, *, device="910b2", num_processes=4, **more):
    job = job_of(config, recipe="r.yaml", device=device, world_size=num_processes, rank=0)
    document = {
        "device": device, "devices": num_processes, "steps": 2, "recipe_digest": job.digest, "ok": True,
        "sentence": "fits: a lot.", "versions": versions(), **more,
    }  # fmt: skip
    directory = directory_of(config, device, num_processes)
    directory.mkdir(parents=True)
    (directory / SUMMARY).write_text(json.dumps(document))


def test_a_rehearsal_of_the_same_recipe_is_found_with_its_result(config):
    assert find_rehearsals(config, 4) == []
    write_rehearsal(config)
    (found,) = find_rehearsals(config, 4)
    assert (found.device, found.sentence, found.is_ok, found.is_current) == ("910b2", "fits: a lot.", True, True)
    assert found.path == config.out / "rehearsal" / "910b2-4"


def test_one_of_another_recipe_or_number_of_processes_is_not_found(config):
    write_rehearsal(config)
    assert find_rehearsals(config, 8) == []
    assert find_rehearsals(replace(config, recompute=RecomputeConfig(kind="full")), 4) == []
    assert find_rehearsals(replace(config, global_batch_size=16), 4) == []


def test_one_of_other_versions_is_marked(config):
    write_rehearsal(config, versions={"torch": "1.0"})
    assert [found.is_current for found in find_rehearsals(config, 4)] == [False]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"devices": 4}'])
def test_another_file_is_no_rehearsal(config, content):
    write_rehearsal(config)
    (directory_of(config, "910b2", 4) / SUMMARY).write_text(content)
    assert find_rehearsals(config, 4) == []


@pytest.mark.parametrize(
    "damage", [{"steps": "two"}, {"steps": 0}, {"device": 5}, {"device": "abacus"}, {"versions": None}]
)
def test_a_damaged_summary_is_no_rehearsal(config, damage):
    write_rehearsal(config)
    path = directory_of(config, "910b2", 4) / SUMMARY
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    assert find_rehearsals(config, 4) == []


def test_files_of_ranks_that_are_not_rehearsed_again_are_removed_and_other_files_are_kept(tmp_path):
    old = [record_path(tmp_path, 3), trace_path(tmp_path, 3), log_path(tmp_path, 0), tmp_path / SUMMARY]
    kept = [record_path(tmp_path, 0), trace_path(tmp_path, 0), tmp_path / "rank-notes.json", tmp_path / "index.html"]
    for path in (*old, *kept):
        path.write_text("")
    remove_others(tmp_path, [0])
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_dry_run_names_the_rehearsal_and_the_work_of_a_new_one(config):
    write_rehearsal(config)
    report = dry_run(config, num_processes=4).rehearsal
    assert [found["sentence"] for found in report["found"]] == ["fits: a lot."]
    run = resolve_run(config, 4)
    assert report["num_ranks"] == 2
    assert report["work_s"] == expected_s(run, 0) + expected_s(run, 1)


def test_more_packs_and_layers_take_longer(config):
    run = resolve_run(config, 4)
    longer = resolve_run(replace(config, global_batch_size=64), 4)
    assert expected_s(longer, 0) > expected_s(run, 0) > expected_s(run, 1)
