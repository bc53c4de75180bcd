# SPDX-License-Identifier: Apache-2.0
"""The door names what is missing and gives back what a test put there."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mindvl_ops.errors import OpsError
from mindvl_ops.npu import door


@pytest.fixture(autouse=True)
def _shut(monkeypatch):
    monkeypatch.setattr(door, "_module", None)


def _installed(monkeypatch, tmp_path, source):
    """A torch_npu made of `source`, as if it were installed."""
    (tmp_path / "torch_npu.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))  # so that what is imported goes afterwards
    del sys.modules["torch_npu"]


def test_without_torch_npu_the_door_says_what_to_install(monkeypatch):
    monkeypatch.setattr(door, "find_spec", lambda name: None)
    with pytest.raises(OpsError, match=r"torch_npu is not installed.*mindvl-ops\[npu\]"):
        door.torch_npu()
    assert door.why_not() == "torch_npu is not installed"


def test_a_wheel_without_its_runtime_libraries_is_named_with_the_library(monkeypatch, tmp_path):
    _installed(monkeypatch, tmp_path, "raise ImportError('libhccl.so: cannot open shared object file')")
    with pytest.raises(OpsError, match=r"libhccl\.so.*set_env\.sh"):
        door.torch_npu()
    assert "libhccl.so" in door.why_not()


def test_a_wheel_for_another_torch_is_refused(monkeypatch, tmp_path):
    _installed(monkeypatch, tmp_path, "__version__ = '1.11.0'")
    with pytest.raises(OpsError, match=r"torch_npu 1\.11\.0 is made for another torch"):
        door.torch_npu()


def test_a_wheel_without_a_device_is_no_npu(monkeypatch, tmp_path):
    source = f"__version__ = '{torch.__version__}'\nclass npu:\n    is_available = staticmethod(lambda: False)"
    _installed(monkeypatch, tmp_path, source)
    assert door.torch_npu().__name__ == "torch_npu"
    assert door.why_not() == "torch_npu finds no NPU device"


def test_what_is_put_at_the_door_is_given_and_taken_away_again(monkeypatch):
    stand_in = ModuleType("torch_npu")
    stand_in.npu = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(door, "find_spec", lambda name: None)
    with door.put(stand_in):
        assert door.torch_npu() is stand_in
        assert door.why_not() is None
    assert door.why_not() == "torch_npu is not installed"
