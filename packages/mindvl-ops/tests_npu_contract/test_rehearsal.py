# SPDX-License-Identifier: Apache-2.0
"""Whole runs of one rank of many on the wheel: `run_training` reaches its end, with the operators and waits of a device."""

import importlib.util
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[3] / "recipes" / "tiny"


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("sft.yaml", ["global_batch_size=4", "parallel.tp_size=2", "parallel.pp_size=2"]),
        ("sft.yaml", ["global_batch_size=4", "parallel.cp_size=2", "optimizer.offload=true"]),
        ("sft-moe.yaml", ["global_batch_size=8", "parallel.ep_size=2"]),
    ],
)
def test_a_rank_of_eight_runs_a_step(recipe, overrides, environment_with_device):
    if importlib.util.find_spec("mindvl_train") is None:
        pytest.skip("mindvl-train is not installed; run `nox -s npu_contract`")
    from mindvl_cli.load import load_config
    from mindvl_train.config import RunConfig
    from mindvl_train.rehearsal.rehearse import rehearse

    config = load_config(RECIPES / recipe, RunConfig, overrides)
    record = rehearse(
        config, recipe=recipe, device="910b2", world_size=8, rank=1, steps=1, environment=environment_with_device
    )
    assert record.kernels["attention"] == "npu"
    assert not record.missing
    names = {name for name in record.operators if name.startswith("npu.npu_fusion_attention")}
    assert len(names) == 2  # forward and backward
    assert record.operators["npu.npu_fusion_attention.default"].flops > 0
    # the model never waits for the device; the totals of a step do, once
    lines = [wait.source.split(":")[0] for wait in record.waits if wait.kind == "read"]
    assert lines.count("mindvl_train/step_totals.py") == 1
    assert not any(line.startswith("mindvl_model/vision") for line in lines)
    assert record.peak.num_bytes > record.persistent_bytes
