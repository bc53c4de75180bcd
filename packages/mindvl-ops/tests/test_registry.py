# SPDX-License-Identifier: Apache-2.0
"""The table of operators: lookups and their errors."""

import pytest

from mindvl_ops import UnknownBackend, registry

OPERATORS = (
    *("adamw", "add_rms_norm", "attention", "cross_entropy", "grouped_matmul", "linear_cross_entropy", "moe_gating"),
    *("moe_permute", "moe_permute_map", "moe_unpermute", "moe_unpermute_map", "patch_embed", "rms_norm", "rotary"),
    *("scaled_masked_softmax", "swiglu"),
)


def test_every_operator_has_a_reference_and_twins_on_both_backends():
    assert registry.operators() == OPERATORS
    assert {registry.backends_of(operator) for operator in OPERATORS} == {("reference", "torch", "npu")}


def test_an_unknown_operator_lists_what_exists():
    with pytest.raises(UnknownBackend, match=r"'atention' does not exist.*attention, cross_entropy"):
        registry.lookup("atention", "torch")


def test_a_missing_backend_lists_what_exists(monkeypatch):
    monkeypatch.delitem(registry._ENTRIES["swiglu"], "npu")
    with pytest.raises(UnknownBackend, match=r"'npu' has no 'swiglu'.*Use one of reference, torch"):
        registry.lookup("swiglu", "npu")
