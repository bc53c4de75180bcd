# SPDX-License-Identifier: Apache-2.0
"""Choosing backends: explicit, whole-process, reversible, and reported."""

import pytest

from mindvl_ops import OpsConfig, OpsError, UnknownBackend, backend, backend_table, select_backends, use_backend
from mindvl_ops.backend import chosen
from mindvl_ops.npu import extension
from mindvl_ops.registry import _ENTRIES, lookup
from mindvl_ops.triton_backend import installed


@pytest.fixture(autouse=True)
def _default_afterwards():
    yield
    select_backends(OpsConfig(backend="torch"))


def _table():
    return {row.operator: row for row in backend_table()}


def test_torch_is_the_default():
    assert {row.chosen for row in backend_table()} == {"torch"}


def test_auto_is_npu_on_an_npu_and_torch_on_a_processor(fake_npu, monkeypatch):
    for kind, expected in (("npu", "npu"), ("cpu", "torch")):
        select_backends(OpsConfig(), kind)
        assert {row.chosen for row in backend_table()} == {expected}
        monkeypatch.setattr(backend, "device_kind", lambda kind=kind: kind)
        select_backends(OpsConfig(overrides={"swiglu": "reference"}))
        table = _table()
        assert (table["attention"].chosen, table["swiglu"].chosen) == (expected, "reference")


def test_auto_on_cuda_takes_the_triton_kernels_that_exist_and_the_table_shows_it():
    select_backends(OpsConfig(overrides={"swiglu": "torch"}), "cuda")
    table = _table()
    fused = {"add_rms_norm", "rms_norm", "rotary", "rotary_qkv"}
    assert {name for name, row in table.items() if row.chosen == "triton"} == fused
    assert {row.chosen for name, row in table.items() if name not in fused} == {"torch"}
    assert table["rotary"].why_not["torch"] == "the Triton kernel is chosen"
    assert table["swiglu"].why_not["triton"] == "override asks for torch"
    assert table["attention"].why_not["triton"] == "not implemented"


def test_without_triton_auto_on_cuda_is_torch_and_the_table_says_why(monkeypatch):
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    select_backends(OpsConfig(), "cuda")
    assert {row.chosen for row in backend_table()} == {"torch"}
    assert _table()["swiglu"].why_not["triton"] == "triton is not installed"
    with pytest.raises(OpsError, match=r"ops\.overrides: backend triton: triton is not installed"):
        select_backends(OpsConfig(overrides={"swiglu": "triton"}), "cuda")


def test_auto_on_an_npu_that_cannot_be_used_is_refused_and_not_replaced(monkeypatch):
    monkeypatch.setattr(extension, "why_not", lambda: "torch_npu is not installed")
    with pytest.raises(OpsError, match="torch_npu is not installed"):
        select_backends(OpsConfig(), "npu")


def test_an_override_changes_one_operator():
    select_backends(OpsConfig(overrides={"attention": "reference"}))
    table = _table()
    assert (table["attention"].chosen, table["swiglu"].chosen) == ("reference", "torch")
    assert table["attention"].why_not["torch"] == "override asks for reference"
    assert table["attention"].why_not["npu"]
    assert chosen("attention") is lookup("attention", "reference")


def test_use_backend_comes_back_even_after_an_error():
    select_backends(OpsConfig(overrides={"swiglu": "reference"}))

    def fail():
        with use_backend("reference"):
            assert _table()["attention"].chosen == "reference"
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert (_table()["attention"].chosen, _table()["swiglu"].chosen) == ("torch", "reference")


def test_use_backend_can_name_operators():
    with use_backend("reference", "rotary"):
        assert (_table()["rotary"].chosen, _table()["swiglu"].chosen) == ("reference", "torch")


def test_a_backend_that_lacks_an_operator_is_refused_and_nothing_changes(monkeypatch):
    monkeypatch.delitem(_ENTRIES["swiglu"], "torch")
    with pytest.raises(UnknownBackend, match="Use one of reference, triton, npu"):
        select_backends(OpsConfig(backend="torch", overrides={"attention": "reference"}))
    with pytest.raises(UnknownBackend, match="operator 'atention' does not exist"):
        select_backends(OpsConfig(overrides={"atention": "torch"}))
    assert {row.chosen for row in backend_table()} == {"torch"}


def test_the_npu_backend_is_refused_with_the_reason_where_there_is_none(monkeypatch):
    monkeypatch.setattr(extension, "why_not", lambda: "torch_npu finds no NPU device")
    with pytest.raises(OpsError, match="torch_npu finds no NPU device"):
        select_backends(OpsConfig(overrides={"swiglu": "npu"}))
    assert _table()["swiglu"].why_not["npu"] == "torch_npu finds no NPU device"
    assert _table()["swiglu"].chosen == "torch"


def test_with_an_npu_every_operator_runs_on_it(fake_npu):
    select_backends(OpsConfig(backend="npu"))
    assert {row.chosen for row in backend_table()} == {"npu"}
    assert {row.why_not["torch"] for row in backend_table()} == {"configuration asks for npu"}
