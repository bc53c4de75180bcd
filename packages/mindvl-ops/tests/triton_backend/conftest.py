# SPDX-License-Identifier: Apache-2.0
"""The kernels run by Triton's interpreter."""

import pytest

from mindvl_ops.testing.interpreter import interpreted_triton


@pytest.fixture(scope="module", autouse=True)
def _interpreter():
    pytest.importorskip("triton")
    with interpreted_triton():
        yield
