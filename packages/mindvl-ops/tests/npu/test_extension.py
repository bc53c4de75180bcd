# SPDX-License-Identifier: Apache-2.0
"""The import of torch_npu names what is missing, and a test can replace the module."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mindvl_ops.errors import OpsError
from mindvl_ops.npu import extension


@pytest.fixture(autouse=True)
def _shut(monkeypatch):
    monkeypatch.setattr(extension, "_module", None)


def _installed(monkeypatch, tmp_path, source):
    """A torch_npu made of `source`, as if it were installed."""
    (tmp_path / "torch_npu.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))  # so that what is imported goes afterwards
    del sys.modules["torch_npu"]


def test_without_torch_npu_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setattr(extension, "find_spec", lambda name: None)
    with pytest.raises(OpsError, match=r"torch_npu is not installed.*mindvl-ops\[npu\]"):
        extension.torch_npu()
    assert extension.why_not() == "torch_npu is not installed"


def test_a_wheel_without_its_runtime_libraries_is_named_with_the_library(monkeypatch, tmp_path):
    _installed(monkeypatch, tmp_path, "raise ImportError('libhccl.so: cannot open shared object file')")
    with pytest.raises(OpsError, match=r"libhccl\.so.*set_env\.sh"):
        extension.torch_npu()
    assert "libhccl.so" in extension.why_not()


def test_a_wheel_for_another_torch_is_refused(monkeypatch, tmp_path):
    _installed(monkeypatch, tmp_path, "__version__ = '1.11.0'")
    with pytest.raises(OpsError, match=r"torch_npu 1\.11\.0 is built for another version of torch"):
        extension.torch_npu()


def test_a_wheel_without_a_device_is_no_npu(monkeypatch, tmp_path):
    source = f"__version__ = '{torch.__version__}'\nclass npu:\n    is_available = staticmethod(lambda: False)"
    _installed(monkeypatch, tmp_path, source)
    assert extension.torch_npu().__name__ == "torch_npu"
    assert extension.why_not() == "torch_npu finds no NPU device"


def test_a_replacement_is_used_inside_the_block_only(monkeypatch):
    stand_in = ModuleType("torch_npu")
    stand_in.npu = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(extension, "find_spec", lambda name: None)
    with extension.replaced_by(stand_in):
        assert extension.torch_npu() is stand_in
        assert extension.why_not() is None
    assert extension.why_not() == "torch_npu is not installed"
