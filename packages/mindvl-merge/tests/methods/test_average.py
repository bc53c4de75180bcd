# SPDX-License-Identifier: Apache-2.0
"""The average by hand, and exact where it can be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindvl_merge.methods import average


def test_weights_are_applied_in_order():
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
    assert average(tensors, (0.75, 0.25)).tolist() == [1.5, 3.0]


@given(count=st.integers(1, 7), seed=st.integers(0, 50))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_copies_of_one_model_give_the_model(dtype, count, seed):
    tensor = torch.randn(50, generator=torch.Generator().manual_seed(seed)).to(dtype)
    merged = average([tensor] * count, (1 / count,) * count).to(dtype)
    assert torch.equal(merged, tensor)


def test_the_inputs_are_not_changed():
    tensor = torch.ones(2, dtype=torch.float64)
    average([tensor, tensor], (0.1, 0.2))
    assert torch.equal(tensor, torch.ones(2, dtype=torch.float64))
