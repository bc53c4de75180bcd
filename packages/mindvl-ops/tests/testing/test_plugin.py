# SPDX-License-Identifier: Apache-2.0
"""A project that only has mindvl-ops installed can test NPU code: its pytest finds the fixtures."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROJECT = """
import pytest
import torch

def norm(x, weight):  # somebody's NPU code
    import torch_npu
    return torch_npu.npu_rms_norm(x, weight, 1e-6)[0]

def test_norm(fake_torch_npu):
    x = torch.randn(3, 8)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(x, torch.ones(8)), expected)
    assert [call.op for call in fake_torch_npu.calls] == ["npu_rms_norm"]

def test_calls(fake_npu):
    assert fake_npu.calls == []
"""


def test_the_fixtures_reach_other_projects(tmp_path):
    (tmp_path / "test_theirs.py").write_text(PROJECT)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
