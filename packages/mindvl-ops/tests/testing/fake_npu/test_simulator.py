# SPDX-License-Identifier: Apache-2.0
"""The simulator in place of torch_npu and in sys.modules, flags for a block, and the state afterwards."""

import sys
from importlib.util import find_spec

import pytest
import torch

from mindvl_ops.npu import extension
from mindvl_ops.testing.fake_npu import RefusedError, Strict, simulate


def test_the_simulator_replaces_torch_npu_and_is_removed_again(fake_npu):
    assert extension.torch_npu() is fake_npu.torch_npu
    assert extension.why_not() is None
    with simulate() as inner:
        assert extension.torch_npu() is inner.torch_npu
    assert extension.torch_npu() is fake_npu.torch_npu


def test_import_finds_it_only_when_asked(fake_npu):
    assert "torch_npu" not in sys.modules
    with fake_npu.as_torch_npu():
        import torch_npu

        assert torch_npu is fake_npu.torch_npu
        assert find_spec("torch_npu") is not None
        assert torch_npu.npu.is_available()
    assert "torch_npu" not in sys.modules


def test_the_module_has_the_surface_that_programs_ask(fake_npu):
    npu = fake_npu.torch_npu
    assert npu.__version__ == "2.13.0"
    assert npu.npu.device_count() == 1
    assert npu.npu.current_device() == 0
    assert npu.npu.get_device_name() == "Ascend910B3"
    assert npu.npu.config.allow_internal_format is False
    npu.npu.synchronize()
    assert fake_npu.syncs == ["synchronize"]
    with pytest.raises(AttributeError, match="module 'torch_npu' has no attribute 'npu_rms_norm_v9'"):
        _ = npu.npu_rms_norm_v9


def test_a_simulation_may_start_with_flags_off():
    x, one = torch.ones(5, 3, 8), torch.ones(5, 1, 8)
    with simulate(Strict(rotary_range=False)) as fake:
        fake.torch_npu.npu_rotary_mul(x, 2 * one, one)
        with fake.relaxed(rotary_range=True), pytest.raises(RefusedError):
            fake.torch_npu.npu_rotary_mul(x, 2 * one, one)
        fake.torch_npu.npu_rotary_mul(x, 2 * one, one)


def test_a_nested_simulation_counts_for_itself(fake_npu):
    with simulate() as inner:
        inner.torch_npu.npu_swiglu(torch.ones(2, 4))
    assert len(inner.calls) == 1
    assert fake_npu.calls == []
