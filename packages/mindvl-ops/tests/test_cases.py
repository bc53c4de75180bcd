# SPDX-License-Identifier: Apache-2.0
"""The example calls: seeded, of the size asked for, and with gradients where they say so."""

import pytest
import torch

from mindvl_ops import use_backend
from mindvl_ops.cases import cases


def test_the_same_seed_gives_the_same_inputs_and_another_one_others():
    first, again, other = cases(torch.bfloat16), cases(torch.bfloat16), cases(torch.bfloat16, seed=1)
    for operator, case in first.items():
        assert all(torch.equal(x, y) for x, y in zip(case.inputs, again[operator].inputs, strict=True)), operator
        assert not torch.equal(case.inputs[0], other[operator].inputs[0]), operator


@pytest.mark.parametrize("tokens", [32, 96])
def test_every_input_has_a_gradient_that_is_not_zero_unless_it_only_chooses(tokens):
    for operator, case in cases(torch.float64, tokens=tokens).items():
        leaves = [x.requires_grad_() for x in case.inputs]
        output = case.function(*leaves)
        assert output.requires_grad == case.trains
        if case.trains:
            output.square().sum().backward()
            reached = [x.grad is not None and bool(x.grad.abs().sum() > 0) for x in leaves]
            assert reached == ([True, False] if operator == "moe_gating" else [True] * len(leaves)), operator


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name, case in cases(torch.float32, tokens=32).items() if case.trains])
def test_autocast_changes_no_operator(name, backend, dtype):
    case = cases(dtype, tokens=32)[name]
    with use_backend(backend):
        expected = case.function(*case.inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = case.function(*case.inputs)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
