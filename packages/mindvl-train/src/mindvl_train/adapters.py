# SPDX-License-Identifier: Apache-2.0
"""The adapters of a run: their first values, and the identity of the weights below them.

Comes after the weights of the model are loaded. A checkpoint of adapters names its base by path and digest, because it is
of no use with other weights; restore.py compares them.
"""

import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mindvl_model import MindVLConfig
from mindvl_model.adapters import LoRAConfig
from mindvl_model.adapters.peft_directory import PeftDirectory
from mindvl_model.adapters.sizes import adapter_parameters
from mindvl_model.counts import count_parameters
from mindvl_model.parameters import PARTS, Part, set_trainable
from mindvl_train.checkpoints.directory import newest_checkpoint
from mindvl_train.config import TRAINABLE, RunConfig

logger = logging.getLogger(__name__)

_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each weight file


def choose_trained(model: Any, model_config: MindVLConfig, config: RunConfig) -> None:
    """Freeze the parts of a model that are not trained, or attach adapters and freeze everything else."""
    from mindvl_model.megatron.adapters import add_adapters

    set_trainable(model, config.trained_parts)
    if config.adapter is not None:
        add_adapters(model, model_config, config.adapter, config.trained_parts)


def start_adapters(model: Any, config: RunConfig) -> None:
    """Set the adapters of a model to their first values: those of init.adapter, or random A and zero B.

    Rows of A that init.adapter does not have are random too.

    Raises:
        WeightError: init.adapter is damaged, or its adapters are not those of the recipe.
    """
    from mindvl_model.megatron.adapters import fill_adapters, initialize_adapters

    assert config.adapter is not None
    initialize_adapters(model, config.seed)
    if config.init.adapter is None:
        return
    directory = PeftDirectory(config.init.adapter)
    directory.check(config.model.resolved, config.adapter, config.trained_parts)
    fill_adapters(model, directory)
    logger.info("loaded adapters from %s", config.init.adapter)


def start_norms(models: Iterable[Any], config: RunConfig) -> None:
    """Set the norms of DoRA to those of the frozen weights, unless init.adapter has them; after the move to the device."""
    from mindvl_model.megatron.adapters import initialize_norms

    for model in models if config.init.adapter is None else ():
        initialize_norms(model)


def adapter_of(manifest: dict[str, Any]) -> tuple[LoRAConfig, tuple[Part, ...]]:
    """The configuration of the adapters of a checkpoint, and the parts that have some, from its manifest."""
    run = manifest["run"]
    fields = run["adapter"] | {"targets": tuple(run["adapter"]["targets"])}
    return LoRAConfig(**fields), tuple(run["trainable"] or TRAINABLE[run["phase"]])


def trained_parameters(config: RunConfig, model: MindVLConfig) -> dict[Part, int]:
    """Number of trained parameters of each trained part, over all ranks."""
    if config.adapter is not None:
        return adapter_parameters(model, config.adapter, config.trained_parts)
    counts = count_parameters(model)
    by_part: dict[Part, int] = {
        "vision": counts.vision,
        "projector": counts.projector,
        "language": counts.language + counts.mtp,
    }
    return {part: by_part[part] for part in PARTS if part in config.trained_parts}


def describe_base(config: RunConfig) -> dict[str, Any] | None:
    """The weights below the adapters, for the manifest: paths, digests and seed; None without adapters."""
    if config.adapter is None:
        return None
    named = {name: path for name, path in vars(config.init).items() if path is not None and name != "adapter"}
    return {
        "seed": config.seed,
        "weights": {name: {"path": str(path), "digest": base_digest(path)} for name, path in named.items()},
    }


def base_digest(path: Path) -> str:
    """Digest of a model directory, or of a mindvl run or checkpoint.

    Reads the headers of weight files and 64 samples of 4 KiB of each: other weights of the same model differ in nearly
    every value, and a base may have hundreds of gigabytes. Checkpoints have checksums of their files already.
    """
    digest = hashlib.sha256()
    if not (path / "config.json").is_file():
        return hashlib.sha256((newest_checkpoint(path) / "files.json").read_bytes()).hexdigest()
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(json.dumps([file.name, size]).encode())
        with file.open("rb") as opened:
            digest.update(opened.read(8 + int.from_bytes(opened.read(8), "little") if size >= 8 else size))
            for sample in range(_SAMPLES):
                opened.seek(sample * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()
