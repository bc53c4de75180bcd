# SPDX-License-Identifier: Apache-2.0
"""What the tests share: a tiny byte-level tokenizer with Qwen's special tokens, and small directories of shards."""

import io
import json
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mindvl_data import (
    DataConfig,
    ImageConfig,
    PackingConfig,
    SourceConfig,
    index_directory,
    load_tokenizer,
    write_shards,
)
from mindvl_data.tokenization import Tokenizer

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["user assistant system read the number image what is it"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS,
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def hf(tokenizer_directory: Path) -> PreTrainedTokenizerFast:
    """The same tokenizer as transformers loads it."""
    return AutoTokenizer.from_pretrained(tokenizer_directory)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_directory: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_directory)


def encode_image(height: int, width: int, *, seed: int = 0, format: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def write_images_source(directory: Path, count: int, *, seed: int = 0) -> Path:
    """A LLaVA file of `count` records with one or two small images each."""
    directory.mkdir(parents=True, exist_ok=True)
    random_source = random.Random(seed)
    records: list[dict[str, Any]] = []
    for number in range(count):
        names = []
        for place in range(random_source.choice([1, 1, 2])):
            size = random_source.choice([(56, 56), (56, 84), (84, 140), (30, 100)])
            name = f"{number}-{place}.{random_source.choice(['png', 'jpg'])}"
            (directory / name).write_bytes(
                encode_image(*size, seed=number, format="JPEG" if name.endswith("jpg") else "PNG")
            )
            names.append(name)
        question = "<image>" * len(names) + "Read the number."
        answer = str(random_source.randrange(10 ** random_source.randint(1, 12)))
        records.append(
            {
                "id": f"n{number}",
                "image": names if len(names) > 1 else names[0],
                "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}],
            }
        )
    path = directory / "records.json"
    path.write_text(json.dumps(records))
    return path


def write_text_source(directory: Path, count: int, *, seed: int = 0) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    random_source = random.Random(seed)
    path = directory / "text.jsonl"
    lines = [json.dumps({"text": "ab " * random_source.randint(2, 30) + str(n)}) for n in range(count)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def shard_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two indexed sources: 60 conversations about images in four shards, 40 plain texts in three."""
    root = tmp_path_factory.mktemp("sources")
    images = write_images_source(root / "images-raw", 60)
    text = write_text_source(root / "text-raw", 40)
    write_shards(images, root / "images", format="llava", samples_per_shard=16)
    write_shards(text, root / "text", format="text", samples_per_shard=15)
    for name in ("images", "text"):
        index_directory(root / name)
    return {"images": root / "images", "text": root / "text"}


@pytest.fixture
def make_config(shard_directories: dict[str, Path], tokenizer_directory: Path) -> Callable[..., DataConfig]:
    def make(**changes: Any) -> DataConfig:
        max_epochs = changes.pop("max_epochs", None)
        settings: dict[str, Any] = {
            "sources": tuple(
                SourceConfig(name=name, path=path, max_epochs=max_epochs) for name, path in shard_directories.items()
            ),
            "tokenizer": tokenizer_directory,
            "packing": PackingConfig(seq_length=256, buffer_size=16),
            "image": ImageConfig(min_pixels=28 * 28, max_pixels=84 * 84),
            "seed": 3,
            "shuffle_window": 20,
        }
        return DataConfig(**(settings | changes))

    return make


@pytest.fixture
def room_for() -> Callable[[int], AbstractContextManager[None]]:
    """room_for(num_bytes): in the block no file of this process can grow beyond that, as on a full disk.

    A block and not a fixture's whole test, because pytest's own output may go to a file.
    """

    @contextmanager
    def limited(num_bytes: int) -> Iterator[None]:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)

    return limited


@pytest.fixture
def tiny_qwen2_5_vl() -> Any:
    """transformers' own Qwen2.5-VL with two layers each for vision and text, every parameter random.

    For the special tokens of `make_tokenizer`.
    """
    torch.manual_seed(0)
    vision = {
        "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32,
        "fullatt_block_indexes": [1], "window_size": 56, "tokens_per_second": 2,
    }  # fmt: skip
    text = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 40, "vocab_size": 400, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        vision_config=vision, text_config=text, image_token_id=5, video_token_id=6,
        vision_start_token_id=3, vision_end_token_id=4, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.15 * torch.randn_like(parameter) + (parameter.ndim == 1))
    return model.train()
