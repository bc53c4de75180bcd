# SPDX-License-Identifier: Apache-2.0
"""Fixtures: process groups of one process, models with random weights, a small tokenizer directory."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mindvl_model.config import MindVLConfig
from mindvl_model.testing.tiny import randomize

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


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
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(SPECIAL_TOKENS + letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS,
    )
    tokenizer.chat_template = CHATML
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(directory)
    return directory
