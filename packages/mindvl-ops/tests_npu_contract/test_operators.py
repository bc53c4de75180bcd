# SPDX-License-Identifier: Apache-2.0
"""Simulator and wheel side by side: schemas, outputs, nodes and gradients of every operator that is simulated."""

import warnings

import pytest
import torch
from contract import CASES, observe

from mindvl_ops.testing.fake_npu import Call, operators, simulate

# Where the wheel's meta kernels cannot be followed: case -> what the wheel shows instead, and why we differ.
DIFFERENT = {
    "attention v2 BNSD": ("backward_error", "TypeError: empty_like()"),  # its gradient's meta kernel is broken
    "attention v2 TND": ("outputs", [10, 4, 64, 8]),  # its meta kernel takes TND for a batched layout
    "attention pse": ("gradients", "'pse[0]': None"),  # its meta kernel leaves the gradient of pse out
    "grouped sum": ("gradients", "'input[0]'"),  # its meta kernel returns the input itself
    "gating": ("backward_error", "RuntimeError: npu.npu_moe_gating_top_k_backward"),
    "gating, groups": ("backward_error", "RuntimeError: npu.npu_moe_gating_top_k_backward"),
    "adamw without out": ("error", "RuntimeError: npu.npu_apply_adam_w"),
    "format cast": ("error", "RuntimeError: npu.npu_format_cast"),
    "convolution": ("error", "RuntimeError: npu.npu_conv3d"),
}


@pytest.fixture(scope="module")
def simulated():
    """What the simulator shows of every case, and the recorded call."""
    seen = {}
    with simulate(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (op, arguments) in CASES.items():
            uses = operators.declared(op).uses
            call = Call.of(op, arguments)
            seen[name] = {
                "call": call.to_json(),
                "uses": list(uses),
                "seen": observe(operators.overload(op), arguments, uses),
            }
    return seen


@pytest.fixture(scope="module")
def on_the_wheel(simulated, with_device):
    """What the wheel shows of the same calls."""
    return dict(zip(simulated, with_device("replay", list(simulated.values())), strict=True))


def test_every_schema_is_that_of_the_wheel(with_device):
    with simulate():
        ours = {name: str(operators.overload(name)._schema) for name in operators.names()}
    theirs = with_device("schemas", list(ours))
    assert ours == theirs


def test_every_operator_has_a_case():
    assert {op for op, _ in CASES.values()} == set(operators.names())


@pytest.mark.parametrize("name", CASES)
def test_the_wheel_shows_the_same(name, simulated, on_the_wheel):
    theirs = on_the_wheel[name]
    if name in DIFFERENT:
        kind, words = DIFFERENT[name]
        assert str(words) in str(theirs.get(kind)), f"the wheel no longer differs: {theirs}"
        return
    assert simulated[name]["seen"] == theirs


def test_the_backward_of_torch_is_not_torch_npu_in_this_process():
    assert not hasattr(torch, "npu")
