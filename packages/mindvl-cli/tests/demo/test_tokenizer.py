# SPDX-License-Identifier: Apache-2.0
"""The demo's tokenizer loads with transformers and keeps digits and special tokens whole."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mindvl_cli.demo.tasks import sample_texts
from mindvl_cli.demo.tokenizer import SPECIAL_TOKENS, train_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(sample_texts(num_samples=70, seed=0), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(directory)


def test_special_tokens_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    for token in SPECIAL_TOKENS:
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


def test_every_digit_is_its_own_token(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("4071") == ["4", "0", "7", "1"]
    assert tokenizer.tokenize("(12,30)") == ["(", "1", "2", ",", "3", "0", ")"]


@pytest.mark.parametrize("text", ["Which number is this?", "A: 12 + 7 =", '\u00e9\u4e2d {"x": [1, 2]}\n\n  end'])
def test_any_text_survives_the_way_there_and_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_template_gives_an_image_its_three_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\nRead the number."}]},
        {"role": "assistant", "content": "4071"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>\nRead the number.<|im_end|>\n"
        "<|im_start|>assistant\n4071<|im_end|>\n"
    )
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_training_twice_gives_the_same_bytes(directory: Path, tmp_path: Path) -> None:
    train_tokenizer(sample_texts(num_samples=70, seed=0), tmp_path)
    for path in directory.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
