# SPDX-License-Identifier: Apache-2.0
"""The recipe of each training stage of the demo, written as the YAML a user would write.

Comes after settings.py; `mindvl train` reads what this writes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindvl_cli.demo.settings import BLOCK, DemoSettings, PhaseSettings


def write_recipe(
    path: Path,
    settings: DemoSettings,
    phase: PhaseSettings,
    *,
    name: str,
    out: Path,
    shards: Path,
    tokenizer: Path,
    seed: int,
    init: Mapping[str, Path],
    trainable: tuple[str, ...] | None = None,
) -> Path:
    """Write the recipe of one stage.

    Args:
        name: "warmup", "multitask" or "sft".
        shards: Folder that holds one folder of indexed shards by source.
        init: Where weights come from, as in InitSection.
    """
    import dataclasses

    import yaml

    data: dict[str, Any] = {
        "sources": [
            {"name": source, "path": str(shards / source), "weight": weight} for source, weight in phase.weights.items()
        ],
        "tokenizer": str(tokenizer),
        "packing": {"seq_length": phase.seq_length},
        "image": {"min_pixels": settings.min_pixels * BLOCK, "max_pixels": phase.max_pixels * BLOCK},
        "seed": seed,
    }
    if phase.text_share is not None:
        data["text_share"] = phase.text_share
    document: dict[str, Any] = {
        "phase": name,
        "out": str(out),
        "seed": seed,
        "model": {
            "vision": _values(dataclasses.asdict(settings.vision)),
            "language": _values(dataclasses.asdict(settings.language)),
        },
        "init": {key: str(value) for key, value in init.items()},
        "data": data,
        "packs_per_step": phase.packs_per_step,
        "schedule": {
            "steps": phase.steps,
            "peak_lr": phase.peak_lr,
            "min_lr": phase.min_lr,
            "lr_warmup_ratio": phase.lr_warmup_ratio,
        },
        "optimizer": {"weight_decay": settings.weight_decay},
        "checkpoints": {"every_steps": max(1, min(250, phase.steps)), "keep_last": 1},
    }
    if trainable is not None:
        document["trainable"] = list(trainable)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def _values(config: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
