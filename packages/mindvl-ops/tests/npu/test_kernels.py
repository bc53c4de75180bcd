# SPDX-License-Identifier: Apache-2.0
"""Every operator on the simulated NPU: near the reference in the ledger, and losses and patches as on any device."""

import pytest
import torch

from mindvl_ops import OpsConfig, check_operators, registry, select_backends


@pytest.fixture(autouse=True)
def _default_afterwards():
    yield
    select_backends(OpsConfig(backend="torch"))


def test_every_operator_is_near_the_reference(fake_npu):
    select_backends(OpsConfig(backend="npu"))
    rows = check_operators(dtypes=[torch.float32, torch.bfloat16])
    assert tuple(row.operator for row in rows) == registry.operators()
    for row in rows:
        assert row.chosen == "npu"
        for name, found in row.comparisons.items():
            assert found.holds, (row.operator, name, found)


def test_what_is_plain_pytorch_calls_nothing_of_torch_npu(fake_npu):
    select_backends(OpsConfig(overrides=dict.fromkeys(("cross_entropy", "linear_cross_entropy", "patch_embed"), "npu")))
    check_operators(dtypes=[torch.bfloat16])
    assert fake_npu.calls == []
