# SPDX-License-Identifier: Apache-2.0
"""What tests of training commands share: a place in which the recipes of the tiny model run."""

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest


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
