# SPDX-License-Identifier: Apache-2.0
"""A transformers folder of safetensors: read tensor by tensor, written whole or not at all.

Comes before names.py turns tensors into parameters. Format: model.safetensors, or shards with
model.safetensors.index.json (Hugging Face).
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mindvl_model.errors import WeightError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class WeightFolder:
    """Names and tensors of a folder; tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model_type = str(_read_json(path / "config.json").get("model_type"))
        self._file_of = self._list_files()

    def names(self) -> list[str]:
        """Every tensor of the folder."""
        return sorted(self._file_of)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU.

        Raises:
            WeightError: The folder has no such tensor, or its file is damaged.
        """
        if name not in self._file_of:
            raise WeightError(f"{self.path}: tensor {name!r} is missing. Take the whole checkpoint it belongs to.")
        file = self._file_of[name]
        try:
            with safe_open(file, framework="pt") as tensors:
                return tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{file}: tensor {name!r} cannot be read ({error}). Fetch the file again.") from error

    def _list_files(self) -> dict[str, Path]:
        if (self.path / INDEX).is_file():
            places = _read_json(self.path / INDEX).get("weight_map")
            if not isinstance(places, dict):
                raise WeightError(f"{self.path / INDEX}: has no weight_map. Fetch the file again.")
            absent = sorted({file for file in places.values() if not (self.path / file).is_file()})
            if absent:
                raise WeightError(f"{self.path / INDEX}: names {absent}, which are not there. Fetch the missing files.")
            return {name: self.path / file for name, file in places.items()}
        single = self.path / SINGLE
        if not single.is_file():
            raise WeightError(f"{self.path}: neither {SINGLE} nor {INDEX} is there. Name a transformers model folder.")
        try:
            with safe_open(single, framework="pt") as tensors:
                return dict.fromkeys(tensors.keys(), single)
        except SafetensorError as error:
            raise WeightError(f"{single}: not a whole safetensors file ({error}). Fetch it again.") from error


def write_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = 4 << 30) -> None:
    """Write named tensors as safetensors into an existing folder, in shards that hold at most shard_bytes.

    Memory stays at one shard. The caller publishes the folder by renaming it.
    """
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = total_bytes = 0

    def flush() -> None:
        save_file(pending, folder / f"shard-{len(shards)}.tmp", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor.detach().cpu().contiguous()
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    weight_map = {}
    for number, names in enumerate(shards):
        file = SINGLE if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}.tmp").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2, sort_keys=True)
        (folder / INDEX).write_text(text + "\n")


def sync_folder(folder: Path) -> None:
    """Force every file of a folder to the disk, before it is renamed into place."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def as_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in another floating type; None keeps its own."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise WeightError(f"{path}: there is no such file. Name a transformers model folder.") from None
    except ValueError as error:
        raise WeightError(f"{path}: not JSON ({error}). Fetch the file again.") from error
