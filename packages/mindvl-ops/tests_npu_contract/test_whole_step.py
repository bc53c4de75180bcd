# SPDX-License-Identifier: Apache-2.0
"""Whole training steps on the wheel: they run to their end, and the device computes every operator itself."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RECIPES = HERE.parents[2] / "recipes" / "tiny"
# Operators that must be among those of a step, or the list is not that of a step.
EXPECTED = {
    "sft.yaml": {"npu.npu_fusion_attention_grad.default", "npu.npu_apply_adam_w.out", "aten.index_copy.default"},
    "sft-moe.yaml": {"npu.npu_moe_gating_top_k.default", "npu.npu_grouped_matmul.default", "aten.xlogy.Tensor"},
    "sft-deepseek.yaml": {"npu.npu_moe_gating_top_k_backward.default", "npu.npu_grouped_matmul.default"},
}


@pytest.mark.parametrize("recipe", EXPECTED)
def test_every_operator_of_a_step_is_registered_for_the_device(recipe, environment_with_device):
    """An operator that is not would be computed on the host, its tensors copied there and back, in every layer."""
    if importlib.util.find_spec("mindvl_train") is None:
        pytest.skip("mindvl-train is not installed; run `nox -s npu_contract`")
    command = [sys.executable, str(HERE / "whole_step.py"), str(RECIPES / recipe)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment_with_device)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    registered = found["operators"]
    assert set(registered) >= EXPECTED[recipe]
    assert len(registered) > 60
    missing = [name for name, is_there in registered.items() if not is_there]
    assert not missing, f"torch_npu computes these on the host: {', '.join(missing)}"
    # The host waits once in a step, for the totals; a test of mindvl-model covers expert parallelism.
    assert found["waits"] == {"step_totals.py reduce_totals": 1}


def test_an_operator_that_the_wheel_does_not_register_is_found(with_device):
    assert with_device("registered", ["special_entr", "xlogy.Tensor", "zeros_like", "_assert_async"]) == [
        False,
        True,
        True,
        False,
    ]
