# SPDX-License-Identifier: Apache-2.0
"""The comparison itself finds a wrong value and a wrong gradient."""

import pytest
import torch

from mindvl_ops import swiglu
from mindvl_ops.registry import _ENTRIES
from mindvl_ops.swiglu import swiglu_reference
from mindvl_ops.testing import assert_parity


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda x: swiglu_reference(x) + 1e-4, "output"),
        (lambda x: swiglu_reference(x * 1.0).detach() + 0 * x.sum(), "gradient 0"),
    ],
)
def test_a_wrong_implementation_is_found(monkeypatch, wrong, name):
    monkeypatch.setitem(_ENTRIES["swiglu"], "torch", wrong)
    with pytest.raises(AssertionError, match=name):
        assert_parity(swiglu, (torch.randn(3, 4),))
