# SPDX-License-Identifier: Apache-2.0
"""A whole MindVL step on the wheel: shapes, types and derivatives of every operator in their real company."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest


def test_a_tiny_model_goes_forward_and_backward_on_the_npu_backend(environment_with_device):
    if importlib.util.find_spec("mindvl_model") is None:
        pytest.skip("mindvl-model is not installed; run `nox -s npu_contract`")
    command = [sys.executable, str(Path(__file__).with_name("whole_model.py"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment_with_device)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["loss"] == [[], "torch.float32", "npu"]
    assert seen["devices"] == ["npu"]
    assert seen["without_gradient"] == []
    assert seen["wrong_gradient"] == []
    calls = seen["calls"]
    # Two vision layers and two language layers. The vision encoder normalises twice a layer and once before the projector; the
    # language model normalises twice a layer, query and key once each, and once at the end.
    assert calls["npu_fusion_attention"] == calls["npu_fusion_attention_grad"] == 4
    assert calls["npu_swiglu"] == calls["npu_swiglu_backward"] == 4
    assert calls["npu_rotary_mul"] == 16  # the backward pass rotates by the negative angle
    assert "npu_rotary_mul_backward" not in calls
    assert calls["npu_rms_norm"] == calls["npu_rms_norm_backward"] == 2 * 2 + 1 + 2 * 4 + 1
