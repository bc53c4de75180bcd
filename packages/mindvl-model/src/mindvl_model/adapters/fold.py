# SPDX-License-Identifier: Apache-2.0
"""Fold the adapters of a PEFT directory into the weights of a model directory, one tensor at a time.

Comes after training, for engines and merges that read plain weights. The result is W + scaling * B A, with the norms of
DoRA if there are some, computed in fp32 and rounded to the data type of W.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from mindvl_model.adapters.peft_directory import PeftDirectory
from mindvl_model.adapters.targets import Target, find_targets
from mindvl_model.errors import WeightError
from mindvl_model.hf.directory_config import config_from_directory
from mindvl_model.weights.directory import WeightDirectory, new_directory, write_weights
from mindvl_model.weights.names import canonical_name


def fold_adapter(
    base: Path,
    adapter: Path,
    out: Path,
    *,
    shard_bytes: int = 4 << 30,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write `out`, a copy of the model directory `base` with the adapters folded in; returns the number of changed tensors.

    Args:
        shard_bytes: Maximum size of a weight file; a larger tensor has its own file.
        progress: Called with the number of written tensors and their total number.

    Raises:
        WeightError: A directory is damaged, the adapters do not belong to the model, or `out` exists or cannot be written.
    """
    if out.exists():
        raise WeightError(f"{out}: already exists. Choose a new directory, or remove it first.")
    config, directory, weights = config_from_directory(base), PeftDirectory(adapter), WeightDirectory(base)
    lora = directory.as_config(config)
    changes: dict[str, tuple[Target, int, int | None]] = {}
    for target in find_targets(config, lora).values():
        for index in target.chosen:
            for expert, name in enumerate(target.published_of(index)):
                changes[f"{name}.weight"] = target, index, expert if target.experts else None
    names = weights.names()
    missing = sorted(changes.keys() - {canonical_name(name) for name in names})
    if missing:
        raise WeightError(
            f"{adapter}: has an adapter for {missing[0]}, which {base} does not have. Use its base model."
        )

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for done, name in enumerate(names):
            tensor = weights.read(name)
            if canonical_name(name) in changes:
                found = directory.read(*changes[canonical_name(name)])
                shape = len(found.b), found.a.shape[1]
                if tensor.shape != shape:
                    raise WeightError(
                        f"{adapter}: the adapter of {name} gives the shape {list(shape)}, but the weight has "
                        f"{list(tensor.shape)}. Use its base model."
                    )
                tensor = found.folded(tensor).to(tensor.dtype)
            yield name, tensor
            progress(done + 1, len(names))

    with new_directory(out) as written:
        with torch.no_grad():
            write_weights(written, tensors(), shard_bytes)
        for file in base.iterdir():
            if file.is_file() and ".safetensors" not in file.name:
                shutil.copyfile(file, written / file.name)
    return len(changes)
