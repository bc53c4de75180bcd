# SPDX-License-Identifier: Apache-2.0
"""What the tests share: a tiny data set of images and text, runs over it, and the tensors of their checkpoints."""

import gc
import importlib
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from PIL import Image
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mindvl_data import DataConfig, ImageConfig, PackingConfig, SourceConfig, index_directory, write_shards
from mindvl_model.testing.tiny import smallest_config
from mindvl_model.testing.tokenizer import save_tokenizer
from mindvl_train import CheckpointConfig, MetricsConfig, ModelSection, RunConfig, ScheduleConfig


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte by byte, with Qwen's special tokens from 0."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def write_images(directory: Path, count: int, seed: int) -> Path:
    """A LLaVA file of questions about one or two images of noise."""
    directory.mkdir()
    choose, noise = random.Random(seed), np.random.default_rng(seed)
    records: list[dict[str, Any]] = []
    for number in range(count):
        names = [f"{number}-{place}.png" for place in range(choose.choice([1, 1, 2]))]
        for name in names:
            height, width = choose.choice([(28, 56), (56, 56), (56, 84)])
            file = io.BytesIO()
            Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
            (directory / name).write_bytes(file.getvalue())
        turns = [
            {"from": "human", "value": "<image>" * len(names) + "?"},
            {"from": "gpt", "value": str(choose.randrange(10 ** choose.randint(1, 8)))},
        ]
        records.append({"id": f"n{number}", "image": names, "conversations": turns})
    path = directory / "records.json"
    path.write_text(json.dumps(records))
    return path


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[SourceConfig, ...]:
    """Two sources of images and one of plain text, indexed."""
    root = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate(("pages", "photos")):
        write_shards(write_images(root / f"{name}-raw", 24, seed), root / name, format="llava", samples_per_shard=10)
    text = root / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": "ab " * (number % 9 + 1)}) for number in range(20)))
    write_shards(text, root / "text", format="text", samples_per_shard=10)
    for name in ("pages", "photos", "text"):
        index_directory(root / name)
    return tuple(SourceConfig(name=name, path=root / name) for name in ("pages", "photos", "text"))


@pytest.fixture(scope="session")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> tuple[SourceConfig, ...]:
    """Sources that no run trains on, 9 samples of images and 7 of text."""
    root = tmp_path_factory.mktemp("held-out")
    write_shards(write_images(root / "pages-raw", 9, seed=77), root / "pages", format="llava", samples_per_shard=5)
    text = root / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": "cd " * (number + 2)}) for number in range(7)))
    write_shards(text, root / "text", format="text", samples_per_shard=5)
    for name in ("pages", "text"):
        index_directory(root / name)
    return tuple(SourceConfig(name=name, path=root / name) for name in ("pages", "text"))


@pytest.fixture(scope="session", autouse=True)
def cheap_collections() -> Iterator[None]:
    """Every run collects garbage when it starts: a fifth of a second each, unless what is imported is set aside."""
    importlib.import_module("mindvl_train.weights")
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def config_for(sources: tuple[SourceConfig, ...], tokenizer_directory: Path) -> Callable[..., RunConfig]:
    """A run of six steps of two packs each with the smallest model, in a given directory."""

    def make(out: Path, *, steps: int = 6, max_epochs: int | None = None, **changes: Any) -> RunConfig:
        model = smallest_config(vocab_size=264)
        data = DataConfig(
            sources=tuple(SourceConfig(name=s.name, path=s.path, max_epochs=max_epochs) for s in sources),
            tokenizer=tokenizer_directory,
            packing=PackingConfig(seq_length=96, buffer_size=8),
            image=ImageConfig(min_pixels=28 * 28, max_pixels=56 * 84),
            num_threads=0,
        )
        settings: dict[str, Any] = {
            "phase": "sft",
            "out": out,
            "data": data,
            "model": ModelSection(vision=model.vision, language=model.language),
            "schedule": ScheduleConfig(steps=steps, peak_lr=3e-3, min_lr=1e-4, lr_warmup_ratio=0.2),
            "global_batch_size": 2,
            "checkpoints": CheckpointConfig(every_steps=3, keep_last=2),
            "metrics": MetricsConfig(every_steps=1, tensorboard=False),
        }
        return RunConfig(**(settings | changes))

    return make


@pytest.fixture
def make_config(config_for: Callable[..., RunConfig], tmp_path: Path) -> Callable[..., RunConfig]:
    """The same in a named directory of the test's own."""
    return lambda out="run", **settings: config_for(tmp_path / out, **settings)


@pytest.fixture
def read_tensors() -> Callable[[Path], dict[str, torch.Tensor]]:
    """Every tensor of a checkpoint by name, read by torch alone."""

    def read(checkpoint: Path) -> dict[str, torch.Tensor]:
        reader = torch_checkpoint.FileSystemReader(checkpoint / "tensors")
        listed = reader.read_metadata().state_dict_metadata
        tensors: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in listed.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        torch_checkpoint.load(tensors, storage_reader=reader, no_dist=True)
        return tensors

    return read


@pytest.fixture
def read_losses() -> Callable[[RunConfig], list[tuple[int, float, float]]]:
    """(step, loss, grad_norm) of every line a run wrote."""

    def read(config: RunConfig) -> list[tuple[int, float, float]]:
        lines = map(json.loads, (config.out / "metrics.jsonl").read_text().splitlines())
        return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]

    return read
