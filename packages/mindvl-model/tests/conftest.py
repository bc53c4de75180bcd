# SPDX-License-Identifier: Apache-2.0
"""Fixtures: process groups of one process, models with random weights, a small tokenizer directory."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mindvl_model.config import MindVLConfig
from mindvl_model.testing.tiny import randomize
from mindvl_model.testing.tokenizer import save_tokenizer


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """Process groups of megatron-core, which every model needs; the tests of other packages make their own."""
    from mindvl_model.megatron.process import single_process

    with single_process():
        yield


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """Builds a whole model with random parameters."""
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_model.model import MindVLModel

    def make(config: MindVLConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        model = MindVLModel(config, BuildConfig(dtype=dtype))
        randomize(model, seed)
        return model

    return make


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with Qwen's special tokens from id 0: 263 tokens."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
