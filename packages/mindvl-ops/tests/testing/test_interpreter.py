# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter inside the block, and the earlier modules after it."""

import os
import sys

import pytest
import torch

from mindvl_ops import OpsError, swiglu, use_backend
from mindvl_ops.testing.interpreter import interpreted_triton


def test_kernels_run_on_a_processor_inside_the_block_only_even_if_triton_was_imported_before():
    triton = pytest.importorskip("triton")
    with interpreted_triton(), use_backend("triton"):
        torch.testing.assert_close(
            swiglu(torch.tensor([0.0, 2.0, 3.0, 4.0])), torch.tensor([0.0, 7.0464]), rtol=1e-4, atol=0
        )
        assert sys.modules["triton"] is not triton
    assert sys.modules["triton"] is triton
    assert "mindvl_ops.triton_backend.kernels" not in sys.modules
    assert os.environ.get("TRITON_INTERPRET") is None
    with use_backend("triton"), pytest.raises(OpsError, match="the tensor is on cpu"):
        swiglu(torch.zeros(2, 4))
