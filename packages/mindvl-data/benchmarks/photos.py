# SPDX-License-Identifier: Apache-2.0
"""The data of the loader benchmark: photo-like images in shards, and a tokenizer directory.

Used by loader.py and scale.py. Images have the 1/f spectrum of natural images (Field 1987), strong edges, and colour
that varies less than brightness, so that their JPEGs have about the bytes per pixel, and hence the decoding cost, of
photographs.
"""

import io
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mindvl_data import index_directory, write_shards

SIZES = ((612, 816), (816, 612), (576, 864), (707, 707))  # (height, width), half a megapixel each
QUALITY = 90
SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
]  # fmt: skip
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _make_words(count: int) -> list[str]:
    syllables = ("ka", "lo", "mi", "ne", "ru", "ta", "si", "vo", "de", "an", "or", "el")
    chooser = random.Random(2)
    return ["".join(chooser.choices(syllables, k=chooser.randint(1, 4))) for _ in range(count)]


_WORDS = _make_words(5_000)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Indexed shards with one image per sample."""

    directory: Path
    num_samples: int
    pixels: int  # of all images
    image_bytes: int


def make_photo(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """An image [height, width, 3]."""
    generator = np.random.default_rng(seed)
    luminance = _field(generator, height, width, slope=1.1)
    for _ in range(12):  # overlapping rectangles add edges, which random phases do not have
        top, left = generator.integers(0, height // 2), generator.integers(0, width // 2)
        bottom, right = top + generator.integers(height // 8, height), left + generator.integers(width // 8, width)
        luminance[top:bottom, left:right] = 0.6 * luminance[top:bottom, left:right] + generator.normal(0, 0.8)
    colour = [_field(generator, height, width, slope=1.4) for _ in range(2)]
    ycc = np.stack([128 + 42 * luminance, 128 + 14 * colour[0], 128 + 14 * colour[1]], axis=-1)
    planes = [Image.fromarray(np.ascontiguousarray(p)) for p in np.moveaxis(ycc.clip(0, 255).astype(np.uint8), -1, 0)]
    return np.asarray(Image.merge("YCbCr", planes).convert("RGB"))


def make_source(
    directory: Path, count: int, *, sizes: tuple[tuple[int, int], ...] = SIZES, num_shards: int = 4
) -> Source:
    """Write and index shards of `count` conversations about one image each."""
    raw = directory / "raw"
    raw.mkdir(parents=True)
    chooser = random.Random(0)
    rows, pixels, image_bytes = [], 0, 0
    for number in range(count):
        height, width = sizes[number % len(sizes)]
        file = io.BytesIO()
        Image.fromarray(make_photo(height, width, number)).save(file, "JPEG", quality=QUALITY)
        (raw / f"{number}.jpg").write_bytes(file.getvalue())
        pixels += height * width
        image_bytes += len(file.getvalue())
        turns = [
            {"from": "human", "value": "<image>\n" + make_text(chooser, 15)},
            {"from": "gpt", "value": make_text(chooser, 60)},
        ]
        rows.append({"id": str(number), "image": f"{number}.jpg", "conversations": turns})
    (raw / "rows.json").write_text(json.dumps(rows))
    write_shards(raw / "rows.json", directory / "shards", format="llava", samples_per_shard=-(-count // num_shards))
    index_directory(directory / "shards")
    return Source(directory=directory / "shards", num_samples=count, pixels=pixels, image_bytes=image_bytes)


def make_text(chooser: random.Random, num_words: int) -> str:
    """A sentence of invented words with Zipf-distributed frequencies."""
    ranks = range(1, len(_WORDS) + 1)
    return " ".join(chooser.choices(_WORDS, [1 / rank for rank in ranks], k=num_words)).capitalize() + "."


def make_tokenizer(directory: Path) -> Path:
    """A byte-level tokenizer of 4,000 tokens with Qwen's special tokens and a ChatML template."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    chooser = random.Random(1)
    backend.train_from_iterator((make_text(chooser, 60) for _ in range(200)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS,
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(directory)
    return directory


def _field(generator: np.random.Generator, height: int, width: int, *, slope: float) -> NDArray[np.float64]:
    """Noise with mean 0 and standard deviation 1 whose amplitude is proportional to frequency**-slope."""
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    frequency = np.hypot(rows, columns)
    frequency[0, 0] = 1.0
    spectrum = np.fft.rfft2(generator.normal(size=(height, width))) / frequency**slope
    spectrum[0, 0] = 0.0
    field = np.fft.irfft2(spectrum, s=(height, width))
    return field / field.std()
