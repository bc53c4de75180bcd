# SPDX-License-Identifier: Apache-2.0
"""Whether the Triton kernels can run, and that nothing imports triton before one does."""

import subprocess
import sys

import pytest

from mindvl_ops.triton_backend import installed


def test_a_missing_package_is_the_reason(monkeypatch):
    assert installed.why_not() is None
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    assert installed.why_not() == "triton is not installed"


@pytest.mark.slow
def test_importing_the_operators_and_choosing_triton_does_not_import_triton():
    program = """
import sys, torch
before = "triton" in sys.modules
import mindvl_ops
mindvl_ops.select_backends(mindvl_ops.OpsConfig(), "cuda")
mindvl_ops.select_backends(mindvl_ops.OpsConfig(), "cpu")
mindvl_ops.swiglu(torch.zeros(2, 4))
assert ("triton" in sys.modules) == before
"""
    subprocess.run([sys.executable, "-c", program], check=True)
