# SPDX-License-Identifier: Apache-2.0
"""Small model directories for the tests."""

import json

import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture
def make_directory(tmp_path):
    """Writes a directory: `make_directory(name, tensors, shards=1)`; tensors are distributed over the shards in turn."""

    def make(name, tensors, shards=1, config=None):
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config or {"model_type": "tiny", "dtype": "float32"}))
        (path / "tokenizer.json").write_text("{}")
        (path / "modeling_tiny.py").write_text("# remote code\n")
        if shards == 1:
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
            return path
        weight_map = {key: f"part-{i % shards}.safetensors" for i, key in enumerate(tensors)}
        for file in sorted(set(weight_map.values())):
            save_file({key: tensors[key] for key in tensors if weight_map[key] == file}, path / file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return path

    return make


@pytest.fixture
def random_tensors():
    """Tensors of a tiny model from a seed."""

    def make(seed, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        shapes = {"language.embed": (7, 4), "language.norm": (4,), "vision.conv": (3, 2, 2, 2), "vision.scale": ()}
        return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}

    return make
