# SPDX-License-Identifier: Apache-2.0
"""Random numbers of PyTorch are the same in every run of a test, and in every replay of a hypothesis example."""

from types import SimpleNamespace

import hypothesis
import pytest
import torch

_TORCH = SimpleNamespace(seed=torch.manual_seed, getstate=torch.get_rng_state, setstate=torch.set_rng_state)
hypothesis.register_random(_TORCH)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
