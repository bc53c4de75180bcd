# SPDX-License-Identifier: Apache-2.0
"""Random numbers of PyTorch are the same in every run of a test, and in every replay of a hypothesis example."""

import hypothesis
import pytest
import torch


class _TorchRandom:
    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_TORCH_RANDOM = _TorchRandom()
hypothesis.register_random(_TORCH_RANDOM)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
