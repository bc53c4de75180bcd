# SPDX-License-Identifier: Apache-2.0
"""Choosing backends: explicit, whole-process, reversible, and told."""

import pytest

from mindvl_ops import OpsConfig, UnknownBackend, backend_table, select_backends, use_backend
from mindvl_ops.backend import chosen
from mindvl_ops.registry import lookup


@pytest.fixture(autouse=True)
def _default_afterwards():
    yield
    select_backends(OpsConfig())


def _table():
    return {row.operator: row for row in backend_table()}


def test_torch_is_the_default():
    assert {row.chosen for row in backend_table()} == {"torch"}


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


def test_a_backend_that_lacks_an_operator_is_refused_and_nothing_changes():
    with pytest.raises(UnknownBackend, match="Use one of reference, torch"):
        select_backends(OpsConfig(backend="npu"))
    with pytest.raises(UnknownBackend, match="operator 'atention' does not exist"):
        select_backends(OpsConfig(overrides={"atention": "torch"}))
    assert {row.chosen for row in backend_table()} == {"torch"}
