# SPDX-License-Identifier: Apache-2.0
"""The table of operators: lookups and their errors."""

import pytest

from mindvl_ops import UnknownBackend, registry

OPERATORS = ("adamw", "attention", "cross_entropy", "patch_embed", "rms_norm", "rotary", "swiglu")


def test_every_operator_has_a_reference_and_a_torch_twin():
    assert set(OPERATORS) <= set(registry.operators())
    assert all(registry.backends_of(operator)[:2] == ("reference", "torch") for operator in OPERATORS)


def test_an_unknown_operator_lists_what_exists():
    with pytest.raises(UnknownBackend, match=r"'atention' does not exist.*attention, cross_entropy"):
        registry.lookup("atention", "torch")


def test_a_missing_backend_lists_what_exists():
    with pytest.raises(UnknownBackend, match=r"'npu' has no 'swiglu'.*Use one of reference, torch"):
        registry.lookup("swiglu", "npu")
