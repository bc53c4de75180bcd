# SPDX-License-Identifier: Apache-2.0
"""The recipe of each training stage of the demo, written as YAML for `mindvl train`.

Comes after settings.py; a user can train any stage again with this file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mindvl_cli.demo.settings import BLOCK, DemoSettings, PhaseSettings
from mindvl_cli.load import to_yaml
from mindvl_cli.whole_file import write_whole

if TYPE_CHECKING:
    from mindvl_train.config import Part, Phase


def write_recipe(
    path: Path,
    settings: DemoSettings,
    settings_of_phase: PhaseSettings,
    *,
    phase: "Phase",
    out: Path,
    shards: Path,
    tokenizer: Path,
    seed: int,
    init: Mapping[str, Path],
    trainable: "tuple[Part, ...] | None" = None,
) -> Path:
    """Write the recipe of one stage.

    Args:
        shards: Directory with one directory of indexed shards per source.
        init: Fields of InitSection: the source of the initial weights.
    """
    from mindvl_data import DataConfig, ImageConfig, PackingConfig, SourceConfig
    from mindvl_train import CheckpointConfig, InitSection, ModelSection, OptimizerConfig, RunConfig, ScheduleConfig

    wanted = settings_of_phase
    config = RunConfig(
        phase=phase,
        out=out,
        seed=seed,
        model=ModelSection(vision=settings.vision, language=settings.language),
        init=InitSection(**init),
        data=DataConfig(
            sources=tuple(
                SourceConfig(name=name, path=shards / name, weight=weight) for name, weight in wanted.weights.items()
            ),
            tokenizer=tokenizer,
            packing=PackingConfig(seq_length=wanted.seq_length),
            image=ImageConfig(min_pixels=settings.min_pixels * BLOCK, max_pixels=wanted.max_pixels * BLOCK),
            text_share=wanted.text_share,
            seed=seed,
        ),
        global_batch_size=wanted.global_batch_size,
        schedule=ScheduleConfig(
            steps=wanted.steps,
            peak_lr=wanted.peak_lr,
            min_lr=wanted.min_lr,
            lr_warmup_ratio=wanted.lr_warmup_ratio,
        ),
        optimizer=OptimizerConfig(weight_decay=settings.weight_decay),
        checkpoints=CheckpointConfig(every_steps=min(250, wanted.steps), keep_last=1),
        trainable=trainable,
    )
    write_whole(path, to_yaml(config))
    return path
