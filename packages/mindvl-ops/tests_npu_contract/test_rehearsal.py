# SPDX-License-Identifier: Apache-2.0
"""Whole runs of one rank of many on the wheel: `run_training` reaches its end, with the operators and waits of a device."""

import importlib.util
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[3] / "recipes" / "tiny"
# Operators that must be among those of a step, or the list is not that of a step.
EXPECTED = {
    "sft.yaml": {"npu.npu_fusion_attention_grad.default", "npu.npu_apply_adam_w.out", "aten.index_copy.default"},
    "sft-moe.yaml": {"npu.npu_moe_gating_top_k.default", "npu.npu_grouped_matmul.default", "aten.xlogy.Tensor"},
    "sft-deepseek.yaml": {"npu.npu_moe_gating_top_k_backward.default", "npu.npu_grouped_matmul.default"},
}


@pytest.mark.parametrize(
    ("recipe", "overrides", "world_size"),
    [
        ("sft.yaml", ["global_batch_size=4"], 2),
        ("sft-moe.yaml", ["global_batch_size=4"], 2),
        ("sft-deepseek.yaml", ["global_batch_size=4"], 2),
        ("sft.yaml", ["global_batch_size=4", "parallel.tp_size=2", "parallel.pp_size=2"], 8),
        ("sft.yaml", ["global_batch_size=4", "parallel.cp_size=2", "optimizer.offload=true"], 8),
        ("sft-moe.yaml", ["global_batch_size=8", "parallel.ep_size=2"], 8),
    ],
)
def test_a_rank_runs_a_step_whose_operators_the_device_computes(recipe, overrides, world_size, environment_with_device):
    """An operator that torch_npu does not register would be computed on the host, its tensors copied there and back."""
    if importlib.util.find_spec("mindvl_train") is None:
        pytest.skip("mindvl-train is not installed; run `nox -s npu_contract`")
    from mindvl_cli.load import load_config
    from mindvl_train.config import RunConfig
    from mindvl_train.rehearsal.rehearse import rehearse

    record = rehearse(
        load_config(RECIPES / recipe, RunConfig, overrides),
        recipe=recipe,
        device="910b2",
        world_size=world_size,
        rank=1,
        steps=1,
        environment=environment_with_device,
    )
    assert record.kernels["attention"] == "npu"
    assert not record.missing
    assert len(record.operators) > 60
    if world_size == 2:
        assert set(record.operators) >= EXPECTED[recipe]
    names = {name for name in record.operators if name.startswith("npu.npu_fusion_attention")}
    assert len(names) == 2  # forward and backward
    assert record.operators["npu.npu_fusion_attention.default"].flops > 0
    # the model never waits for the device; the totals of a step do, once
    lines = [wait.source.split(":")[0] for wait in record.waits if wait.kind == "read"]
    assert lines.count("mindvl_train/step_totals.py") == 1
    assert not any(line.startswith("mindvl_model/vision") for line in lines)
    assert record.peak.num_bytes > record.persistent_bytes


def test_an_operator_that_the_wheel_does_not_register_is_found(with_device):
    assert with_device("registered", ["special_entr", "xlogy.Tensor", "zeros_like", "_assert_async"]) == [
        False,
        True,
        True,
        False,
    ]
