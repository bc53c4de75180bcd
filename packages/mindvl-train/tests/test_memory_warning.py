# SPDX-License-Identifier: Apache-2.0
"""A run that does not fit is warned about, with the overrides that make it fit."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mindvl_model.parallel_config import ParallelConfig
from mindvl_train import ModelSection, RunConfig
from mindvl_train.memory_warning import memory_warning
from mindvl_train.resolved_run import ResolvedRun, resolve_run


@pytest.fixture
def make_run(make_config: Callable[..., RunConfig]) -> Callable[[int], ResolvedRun]:
    def make(seq_length: int) -> ResolvedRun:
        config = make_config(
            phase="warmup",
            model=ModelSection(size="mindvl-8b"),
            global_batch_size=1024,
            precision="bf16",
            parallel=ParallelConfig(pp_size=2, virtual_stages=4, stage_layers=(5, 5, 4, 5, 4, 5, 4, 4)),
        )
        packing = replace(config.data.packing, seq_length=seq_length)
        return resolve_run(replace(config, data=replace(config.data, packing=packing)), 128)

    return make


def test_a_run_that_fits_and_a_run_on_a_cpu_have_no_warning(make_run: Callable[[int], ResolvedRun]) -> None:
    assert list(memory_warning(make_run(4096), torch.device("cpu"), "npu")) == []
    assert list(memory_warning(make_run(65536), torch.device("cpu"), "cpu")) == []


def test_offloaded_activations_are_proposed_beside_recomputation(make_run: Callable[[int], ResolvedRun]) -> None:
    (warning,) = memory_warning(make_run(16384), torch.device("cpu"), "npu")
    assert warning.startswith("parallel: rank 0 needs 8")
    assert "but 60.2 of 64 GB of a 910B2 are usable. Set recompute.offload_layers=" in warning
    assert "GB of host memory for each device" in warning
    assert " or recompute.kind=full recompute.layers=" in warning


def test_a_run_that_no_setting_makes_fit_needs_more_devices(make_run: Callable[[int], ResolvedRun]) -> None:
    (warning,) = memory_warning(make_run(262144), torch.device("cpu"), "npu")
    assert warning.endswith("are usable. Use more devices, or search other layouts with mindvl plan.")
