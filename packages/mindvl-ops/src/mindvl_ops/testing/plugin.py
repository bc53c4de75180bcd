# SPDX-License-Identifier: Apache-2.0
"""pytest fixtures of the simulated NPU, for any project that has mindvl-ops installed (entry point `pytest11`)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .fake_npu import FakeNpu


@pytest.fixture
def fake_npu() -> Iterator["FakeNpu"]:
    """The simulated NPU in place of torch_npu, with every strict flag on."""
    from .fake_npu import simulate  # pytest loads this file at every start; the operators wait until they are asked for

    with simulate() as fake:
        yield fake


@pytest.fixture
def fake_torch_npu(fake_npu: "FakeNpu") -> Iterator["FakeNpu"]:
    """The same, and `import torch_npu` finds it too."""
    with fake_npu.as_torch_npu():
        yield fake_npu
