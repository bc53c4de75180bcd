# SPDX-License-Identifier: Apache-2.0
"""What a start reads, by hand for small layouts, and against models on the meta device."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from mindvl_model import MindVLConfig
from mindvl_model.parallel_config import ParallelConfig
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen3_moe
from mindvl_train import ModelSection, RunConfig
from mindvl_train.reading import FACTOR, Storage, reads_of, seconds_to_read, stages_of, start_timeout
from mindvl_train.resolved_run import ResolvedRun, resolve_run

MOE = smallest_qwen3_moe()


def run_of(config: RunConfig, model: MindVLConfig, num_processes: int, **sizes: int) -> ResolvedRun:
    parallel = ParallelConfig(**sizes, spread_images=True)
    section = ModelSection(vision=model.vision, language=model.language)
    return resolve_run(replace(config, model=section, parallel=parallel, global_batch_size=64), num_processes)


def run_671b(config: RunConfig) -> ResolvedRun:
    """recipes/mindvl-671b-a37b/multitask.yaml on 1,024 devices."""
    layers = (4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 3, 4, 4, 3)
    parallel = ParallelConfig(
        tp_size=2, pp_size=4, virtual_stages=4, stage_layers=layers, ep_size=128, spread_images=True
    )
    model = ModelSection(size="mindvl-671b-a37b")
    return resolve_run(replace(config, model=model, parallel=parallel, precision="bf16", global_batch_size=1024), 1024)


@pytest.mark.parametrize(
    ("by_machine", "seconds"),
    [
        ([10e9], 2.0),  # one machine has 5 GB/s
        ([10e9, 10e9], 2.5),  # two share 8 GB/s
        ([4e9, 10e9], 2.2),  # both at 4 GB/s for 1 s, then 6 GB at 5 GB/s
        ([0.0, 10e9], 2.0),
    ],
)
def test_machines_share_the_storage_until_each_is_done(by_machine: list[float], seconds: float) -> None:
    assert seconds_to_read(by_machine, Storage(machine_gb_s=5, total_gb_s=8)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "model",
    [smallest_deepseek_v3(num_mtp_layers=1), MOE, smallest_config(), smallest_config(tie_embeddings=True)],
    ids=["deepseek", "moe", "dense", "tied"],
)
def test_the_stages_have_the_parameters_of_the_model(
    model: MindVLConfig, make_config: Callable[..., RunConfig]
) -> None:
    from mindvl_model import set_up_device

    set_up_device()
    from mindvl_train.megatron.fake_groups import fake_process_groups, meta_models

    run = run_of(make_config(), model, 2, pp_size=2)
    for stage, expected in enumerate(stages_of(run)):
        with fake_process_groups(stage, 2, run.parallel):
            models = meta_models(run.model, run.build)
        assert expected.total == sum(one.numel() for model in models for one in model.parameters())
        experts = sum(one.numel() for model in models for name, one in model.named_parameters() if ".experts." in name)
        assert expected.experts == experts


def test_ranks_of_a_machine_read_shared_weights_once(make_config: Callable[..., RunConfig]) -> None:
    whole = run_of(make_config(), MOE, 1)
    (all_of,) = stages_of(whole)
    weights = 4 * all_of.total  # fp32
    assert reads_of(whole, resumes=False).read_bytes == weights
    assert reads_of(whole, resumes=True).read_bytes == reads_of(whole, resumes=True).stored_bytes == 3 * weights
    # Eight data-parallel ranks on one machine hold the same weights, on two machines each reads them.
    same = run_of(make_config(), MOE, 8)
    assert reads_of(same, resumes=False, ranks_per_machine=8).read_bytes == weights
    assert reads_of(same, resumes=False, ranks_per_machine=4).read_bytes == 2 * weights
    # The optimizer state is divided among all ranks.
    resumed = reads_of(same, resumes=True, ranks_per_machine=4)
    assert resumed.read_bytes == pytest.approx(2 * weights + 2 * weights)
    # Experts are divided among four ranks: a machine of two ranks reads half of them.
    divided = reads_of(run_of(make_config(), MOE, 4, ep_size=4), resumes=False, ranks_per_machine=2)
    rest = 4 * (all_of.total - all_of.experts)
    assert divided.read_bytes == pytest.approx(2 * rest + 4 * all_of.experts)
    assert divided.largest_bytes == pytest.approx(divided.read_bytes / 2)


def test_the_timeout_of_collectives_follows_from_the_time_of_reading(make_config: Callable[..., RunConfig]) -> None:
    small = run_of(make_config(), MOE, 1)
    assert start_timeout(small) == timedelta(seconds=2400)  # four times the limit of the watchdog
    run = run_671b(make_config())
    strict = replace(run, config=replace(run.config, faults=replace(run.config.faults, stuck_after_s=10)))
    seconds = reads_of(run, resumes=True).seconds
    assert seconds > 60
    assert start_timeout(strict) == timedelta(seconds=FACTOR * seconds)


def test_the_671b_start_reads_what_its_ranks_hold(make_config: Callable[..., RunConfig]) -> None:
    reads = reads_of(run_671b(make_config()), resumes=False)
    # 683.34B parameters and the embedding that the last stage has again, in bf16
    assert reads.stored_bytes == pytest.approx(2 * 683.34e9, rel=0.01)
    assert reads.machines == 128
    # A machine reads 8 of 128 shards of the experts of its stage, and all its other weights.
    assert reads.read_bytes == pytest.approx(3.9e12, rel=0.02)
    assert reads.seconds == pytest.approx(3.9e12 / 50e9, rel=0.02)
