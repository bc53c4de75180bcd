# SPDX-License-Identifier: Apache-2.0
"""Settings that cannot work are refused with what to do about them."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindvl_model.testing.tiny import smallest_config
from mindvl_train import (
    CheckpointConfig,
    InitSection,
    MetricsConfig,
    ModelSection,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from mindvl_train.config import FaultsConfig, ParallelConfig

MODEL = smallest_config()
SCHEDULE = {"steps": 10, "peak_lr": 1e-3}


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (ModelSection, {}, "give either size, or directory, or both vision and language"),
        (ModelSection, {"size": "tiny", "vision": MODEL.vision}, "Keep one of the three"),
        (ModelSection, {"vision": MODEL.vision}, "Keep one of the three"),
        (ModelSection, {"directory": Path("nowhere")}, "nowhere"),
        (ModelSection, {"size": "huge"}, r"model size: 'huge' is unknown. .*tiny"),
        (InitSection, {"checkpoint": Path("a"), "model": Path("b")}, "exclude each other"),
        (InitSection, {"model": Path("a"), "vision": Path("b")}, "exclude each other"),
        (InitSection, {"checkpoint": Path("a"), "language": Path("b")}, "exclude each other"),
        (ScheduleConfig, SCHEDULE | {"steps": 0}, "steps=0 must be between 1 and"),
        (ScheduleConfig, SCHEDULE | {"min_lr": 0.1}, r"min_lr=0\.1 must lie between 0 and peak_lr=0\.001"),
        (ScheduleConfig, SCHEDULE | {"min_lr": -1.0}, r"min_lr=-1\.0 must lie between"),
        (ScheduleConfig, SCHEDULE | {"lr_warmup_ratio": 1.0}, r"lr_warmup_ratio=1\.0 is not a share below 1"),
        (CheckpointConfig, {"every_steps": 0}, "every_steps=0 saves nothing"),
        (CheckpointConfig, {"every_steps": 0, "keep_every_steps": 2}, "every_steps=0 saves nothing"),
        (ScheduleConfig, SCHEDULE | {"peak_lr": math.inf}, "peak_lr=inf is no learning rate"),
        (OptimizerConfig, {"beta2": 1.0}, r"beta2=1\.0 is no share below 1"),
        (OptimizerConfig, {"clip_grad_norm": math.nan}, "clip_grad_norm=nan is below 0 or no number"),
        (OptimizerConfig, {"epsilon": 0.0}, r"epsilon=0\.0 is not above 0"),
        (MetricsConfig, {"wandb_project": ""}, "wandb_project is empty"),
        (FaultsConfig, {"max_skipped": 0}, "max_skipped=0 allows no step"),
        (FaultsConfig, {"stuck_after_s": -1.0}, r"stuck_after_s=-1\.0 must be between 0"),
        (CheckpointConfig, {"keep_last": 0}, "keep_last=0 saves nothing"),
        (MetricsConfig, {"every_steps": 0}, "every_steps=0 reports nothing"),
        (MetricsConfig, {"peak_tflops": 0.0}, r"peak_tflops=0\.0 is no speed"),
        (CheckpointConfig, {"every_steps": 10, "keep_every_steps": 0}, "keep_every_steps=0 is not a multiple"),
        (FaultsConfig, {"spike_factor": float("nan")}, "spike_factor=nan calls every step a spike"),
        (ParallelConfig, {"ep_size": 1 << 30}, "ep_size=1073741824 must be between 1 and"),
        (ParallelConfig, {"pp_size": 2, "stage_layers": (-1, 5)}, r"stage_layers=\[-1, 5\] has a number below 0"),
    ],
)
def test_impossible_settings_are_refused(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_both_backbones_may_start_from_directories_of_their_own() -> None:
    assert InitSection(vision=Path("a"), language=Path("b")).checkpoint is None


def test_a_run_checks_what_its_sections_cannot(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    with pytest.raises(ValueError, match="global_batch_size=0 must be between 1 and"):
        replace(config, global_batch_size=0)
    with pytest.raises(ValueError, match="seed=-1 must be between 0 and"):
        replace(config, seed=-1)
    with pytest.raises(ValueError, match="trainable is empty"):
        replace(config, trainable=())
    image = replace(config.data.image, patch_size=16, min_pixels=32 * 32)
    with pytest.raises(ValueError, match=r"data\.image\.patch_size=16, but the model's patch_size is 14"):
        replace(config, data=replace(config.data, image=image))


def test_the_phase_decides_what_is_trained_unless_it_is_named(make_config: Callable[..., RunConfig]) -> None:
    assert make_config(phase="warmup").trained_parts == ("projector",)
    assert set(make_config(phase="multitask").trained_parts) == {"vision", "projector", "language"}
    assert make_config(phase="warmup", trainable=("vision", "projector")).trained_parts == ("vision", "projector")


def test_a_section_resolves_to_a_model() -> None:
    assert ModelSection(size="tiny").resolve().language.num_layers == 4
    halves = ModelSection(vision=MODEL.vision, language=MODEL.language).resolve()
    assert (halves.vision, halves.language) == (MODEL.vision, MODEL.language)
