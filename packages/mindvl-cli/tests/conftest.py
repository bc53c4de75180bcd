# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures: a directory in which the recipes of the tiny model run, a tiny exported model, and a benchmark."""

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROCESSOR_CODE = """
from transformers import ProcessorMixin


class TinyProcessor(ProcessorMixin):
    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token = "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs, image_idx, **kwargs):
        patches = int(image_inputs["image_grid_thw"][image_idx].prod())
        return self.image_token * (patches // self.image_processor.merge_size**2)
"""


@pytest.fixture(scope="session")
def tiny_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `tokenizer` and `shards/captions`, `shards/pages` and `shards/text`, as recipes/tiny names them."""
    from mindvl_cli.demo.tokenizer import train_tokenizer
    from mindvl_data import index_directory, write_shards

    place = tmp_path_factory.mktemp("place")
    train_tokenizer(["a page with digits 0123456789", "what is written here?"], place / "tokenizer")
    for seed, name in enumerate(("captions", "pages")):
        write_shards(_images(place / f"{name}-raw", seed), place / "shards" / name, format="llava")
    text = place / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": "some words " * (number % 7 + 1)}) for number in range(24)))
    write_shards(text, place / "shards" / "text", format="text")
    for name in ("captions", "pages", "text"):
        index_directory(place / "shards" / name)
    return place


def _images(directory: Path, seed: int) -> Path:
    """A LLaVA file of questions about images of noise."""
    from PIL import Image

    directory.mkdir()
    choose, noise = random.Random(seed), np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for number in range(24):
        file = io.BytesIO()
        size = (*choose.choice([(56, 56), (56, 84), (84, 112), (84, 168)]), 3)  # windows are 112 x 112
        Image.fromarray(noise.integers(0, 256, size, dtype=np.uint8)).save(file, "PNG")
        (directory / f"{number}.png").write_bytes(file.getvalue())
        turns = [
            {"from": "human", "value": "<image>what is written here?"},
            {"from": "gpt", "value": str(choose.randrange(10 ** choose.randint(1, 8)))},
        ]
        rows.append({"id": f"n{number}", "image": f"{number}.png", "conversations": turns})
    path = directory / "rows.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random vision-language model with its own processor code."""
    import torch
    from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from mindvl_cli.demo.tokenizer import train_tokenizer

    directory = tmp_path_factory.mktemp("model")
    text = AutoTokenizer.from_pretrained(train_tokenizer(["read the number 0123456789"], directory, vocab_size=300))
    text.save_pretrained(directory)
    ids = {
        name: text.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("vision_start", "vision_end", "image_pad", "video_pad")
    }
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(text), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
            "bos_token_id": None, "eos_token_id": text.eos_token_id, "pad_token_id": text.pad_token_id,
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
            "fullatt_block_indexes": [1], "window_size": 112,
        },
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"], vision_end_token_id=ids["vision_end"],
    )  # fmt: skip
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(directory)
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * 784, "longest_edge": 16 * 784})
    images.save_pretrained(directory)
    (directory / "processing_tiny.py").write_text(PROCESSOR_CODE)
    stored = {
        "processor_class": "TinyProcessor",
        "auto_map": {"AutoProcessor": "processing_tiny.TinyProcessor"},
        "image_processor": json.loads(images.to_json_string()),
    }
    (directory / "processor_config.json").write_text(json.dumps(stored))
    (directory / "preprocessor_config.json").unlink()
    return directory


@pytest.fixture(scope="session")
def qwen3_vl_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3-VL, whose visual tokens are 32 x 32 pixels, with its published processor: 4 to 16 of them."""
    from dataclasses import replace

    from transformers import AutoTokenizer

    from mindvl_cli.demo.tokenizer import train_tokenizer
    from mindvl_model.config import TokenConfig
    from mindvl_model.hf.processor_files import ProcessorSettings, write_published_processor
    from mindvl_model.testing.tiny import save_qwen2_5_vl, smallest_qwen3_vl

    place = tmp_path_factory.mktemp("qwen3_vl")
    tokenizer = train_tokenizer(["read the number 0123456789"], place / "tokenizer", vocab_size=300)
    text = AutoTokenizer.from_pretrained(tokenizer)
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {field: text.convert_tokens_to_ids(f"<|{name}|>") for field, name in names.items()}
    tokens = TokenConfig(**ids, end_of_turn=text.eos_token_id, pad=text.pad_token_id)
    config = replace(smallest_qwen3_vl(vocab_size=len(text)), tokens=tokens)
    save_qwen2_5_vl(config, place / "model")
    limits = ProcessorSettings(min_pixels=4 * 1024, max_pixels=16 * 1024)
    write_published_processor(place / "model", tokenizer, limits, config.vision)
    return place / "model"


@pytest.fixture
def benchmark_file(tmp_path: Path) -> Path:
    """Nine questions: none, one or two images, exact, point and box."""
    from PIL import Image

    rows = []
    sizes = [(60, 40), (200, 90), (30, 160)]
    for number, (width, height) in enumerate(sizes):
        Image.new("RGB", (width, height), (40 * number, 90, 200)).save(tmp_path / f"{number}.png")
        rows += [
            {
                "id": f"read{number}",
                "task": "read",
                "images": [f"{number}.png"],
                "question": "<image>\nread",
                "answer": "1",
            },
            {"id": f"text{number}", "task": "text", "question": f"{number} + 1", "answer": str(number + 1)},
        ]
    box = {"images": ["0.png"], "question": "<image>\nwhere", "answer": "", "box": [10, 10, 30, 30]}
    rows += [
        {"id": "point", "task": "locate", "score": "point", **box},
        {"id": "box", "task": "locate", "score": "box", **box},
        {
            "id": "two",
            "task": "compare",
            "images": ["0.png", "1.png"],
            "question": "A <image> B <image>",
            "answer": "A",
        },
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path
