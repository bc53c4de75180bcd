# SPDX-License-Identifier: Apache-2.0
"""The ledger: every operator is compared, a wrong implementation shows, the table says it."""

import math

import pytest
import torch

from mindvl_ops import OpsConfig, check_operators, registry, select_backends, table_text
from mindvl_ops.cases import cases
from mindvl_ops.registry import _ENTRIES
from mindvl_ops.testing import TOLERANCES


@pytest.fixture(autouse=True)
def _default_afterwards():
    yield
    select_backends(OpsConfig(backend="torch"))


def test_there_is_a_case_for_every_operator():
    assert tuple(sorted(cases(torch.float32))) == registry.operators()


def test_the_torch_backend_is_near_the_reference_in_every_operator():
    state = torch.get_rng_state()
    rows = {row.operator: row for row in check_operators()}
    assert torch.equal(state, torch.get_rng_state())
    assert tuple(rows) == registry.operators()
    for row in rows.values():
        for name, found in row.comparisons.items():
            assert found.tolerance == TOLERANCES[getattr(torch, name)]
            assert found.holds, (row.operator, name, found)
    assert [name for name, row in rows.items() if row.comparisons["float32"].backward is None] == ["adamw"]
    assert {row.speed_ratio for row in rows.values()} == {None}


def test_a_wrong_implementation_and_one_that_refuses_are_seen(monkeypatch):
    def refusing(x, weight, eps):
        raise RuntimeError("no kernel for this type\nand a long trace")

    right = _ENTRIES["swiglu"]["torch"]
    monkeypatch.setitem(_ENTRIES["swiglu"], "torch", lambda x: right(x) + 0.5)
    monkeypatch.setitem(_ENTRIES["rms_norm"], "torch", refusing)
    select_backends(OpsConfig(backend="torch"))
    rows = {row.operator: row for row in check_operators(dtypes=[torch.float32])}
    assert rows["swiglu"].comparisons["float32"].forward > 0.01
    assert rows["swiglu"].comparisons["float32"].backward < 1e-5
    assert rows["rms_norm"].comparisons["float32"].reason == "RuntimeError: no kernel for this type"
    assert {name for name, row in rows.items() if not row.holds} == {"swiglu", "rms_norm"}
    lines = {line.split()[0]: line for line in table_text(list(rows.values())).splitlines()}
    assert "ABOVE TOLERANCE" in lines["swiglu"]
    assert "no kernel for this type" in lines["rms_norm"]
    assert math.isnan(rows["rms_norm"].comparisons["float32"].forward)


def test_the_table_has_one_line_for_each_operator_and_names_the_reasons():
    select_backends(OpsConfig(overrides={"swiglu": "reference"}))
    lines = table_text(check_operators(dtypes=[torch.float32])).splitlines()
    assert len(lines) == 1 + len(registry.operators())
    assert lines[0].split()[:2] == ["operator", "backend"]
    (swiglu,) = [line for line in lines if line.startswith("swiglu")]
    assert "override asks for reference" in swiglu
    assert "npu: " in swiglu


def test_speed_is_a_ratio_to_the_reference_where_another_backend_runs(monkeypatch):
    monkeypatch.setattr("mindvl_ops.check._TIMED_TOKENS", 64)
    select_backends(OpsConfig(overrides={"swiglu": "reference"}))
    ratios = {row.operator: row.speed_ratio for row in check_operators(dtypes=[torch.float32], timed=True)}
    assert ratios.pop("swiglu") is None
    assert all(ratio > 0 for ratio in ratios.values())
