# SPDX-License-Identifier: Apache-2.0
"""Rank classes: every rank is in one class, ranks that differ are in different ones, and choices are checked."""

from dataclasses import replace

import pytest

from mindvl_data import DataConfig, PackingConfig, SourceConfig
from mindvl_model.parallel_config import ParallelConfig
from mindvl_train import ModelSection, RunConfig, ScheduleConfig, TrainError
from mindvl_train.layout_search.packs import Pack
from mindvl_train.rehearsal.classes import class_of, rank_classes, select_ranks
from mindvl_train.resolved_run import resolve_run

# Images of 64, 64 and 16 patches: the first of two ranks gets 64 and 16, or 64.
PACK = Pack(segments=(256,), grids=((1, 8, 8), (1, 8, 8), (1, 4, 4)))


def run(size, num_processes, **parallel):
    source = SourceConfig(name="a", path="a", weight=1.0)
    config = RunConfig(
        phase="sft",
        out="out",
        model=ModelSection(size=size),
        data=DataConfig(sources=(source,), tokenizer="t", packing=PackingConfig(seq_length=256)),
        schedule=ScheduleConfig(steps=1, peak_lr=1e-3),
        global_batch_size=64,
        parallel=ParallelConfig(**parallel),
    )
    return resolve_run(config, num_processes)


def test_data_parallel_ranks_are_one_class():
    (only,) = rank_classes(run("tiny", 8), PACK)
    assert only.ranks == tuple(range(8))
    assert only.content == "stage 0 of 1: 4 layers, vision encoder, projector, embedding, head"


def test_every_pipeline_rank_is_a_class_with_the_layers_of_its_virtual_stages():
    found = rank_classes(run("mindvl-8b", 16, pp_size=2, virtual_stages=2, stage_layers=(8, 10, 9, 9)), PACK)
    assert [each.representative for each in found] == [0, 8]
    assert [each.content for each in found] == [
        "stage 0 of 2: 8 + 9 layers, vision encoder, projector, embedding",
        "stage 1 of 2: 10 + 9 layers, head",
    ]


def test_ranks_that_encode_other_images_are_classes_of_the_first_stage_only():
    found = rank_classes(run("mindvl-8b", 16, pp_size=2, tp_size=2, spread_images=True), PACK)
    assert [each.ranks for each in found] == [(0, 2, 4, 6), (1, 3, 5, 7), tuple(range(8, 16))]
    assert "1 images of 64 patches" in found[1].content
    even = replace(PACK, grids=PACK.grids[:2])
    assert len(rank_classes(run("mindvl-8b", 16, pp_size=2, tp_size=2, spread_images=True), even)) == 2
    assert len(rank_classes(run("mindvl-8b", 16, pp_size=2, tp_size=2, spread_images=False), PACK)) == 2


@pytest.mark.parametrize(("tp_size", "cp_size", "pp_size"), [(2, 2, 4), (1, 4, 2), (4, 1, 1)])
def test_every_rank_is_in_exactly_one_class(tp_size, cp_size, pp_size):
    found = rank_classes(run("mindvl-8b", 64, tp_size=tp_size, cp_size=cp_size, pp_size=pp_size), PACK)
    assert sorted(rank for each in found for rank in each.ranks) == list(range(64))
    assert all(rank in class_of(found, rank).ranks for rank in range(64))


def test_the_default_is_one_rank_of_each_class():
    job = run("mindvl-671b-a37b", 128, tp_size=2, pp_size=4, ep_size=16, spread_images=True)
    classes = rank_classes(job, PACK)
    chosen = select_ranks(job, classes, None)
    assert chosen.ranks == (0, 1, 32, 64, 96)
    assert "multi-token prediction, head" in classes[-1].content


def test_all_adds_the_last_rank_and_a_neighbour_in_every_group():
    """Two stages of 8 ranks: tensor-parallel neighbours are 1 apart, context-parallel 2, data-parallel 4."""
    job = run("mindvl-8b", 16, tp_size=2, cp_size=2, pp_size=2, spread_images=False)
    chosen = select_ranks(job, rank_classes(job, PACK), "all")
    assert chosen.ranks == (0, 1, 2, 4, 7, 8, 9, 10, 12, 15)
    assert "a sample of 10 of 16 ranks" in chosen.rule


def test_all_adds_neighbours_in_both_expert_groups():
    """One stage of 32 ranks with 16 expert-parallel ranks: rank 1 has other experts, rank 16 the same as rank 0."""
    job = run("mindvl-671b-a37b", 32, ep_size=16)
    assert select_ranks(job, rank_classes(job, PACK), "all").ranks == (0, 1, 16, 31)


@pytest.mark.parametrize("choice", ["some", "1,,2", "-1", "0,16"])
def test_a_choice_that_is_no_rank_is_refused(choice):
    job = run("tiny", 16)
    with pytest.raises(TrainError, match="--ranks: "):
        select_ranks(job, rank_classes(job, PACK), choice)


def test_given_ranks_are_taken_as_they_are():
    job = run("tiny", 16)
    assert select_ranks(job, rank_classes(job, PACK), "3, 0,3").ranks == (0, 3)
