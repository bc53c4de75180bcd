# SPDX-License-Identifier: Apache-2.0
"""Settings that cannot work are refused with what to do about them."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindvl_model.parallel_config import ParallelConfig
from mindvl_model.testing.tiny import save_qwen2_5_vl, smallest_config, smallest_qwen2_5_vl
from mindvl_train import (
    CheckpointConfig,
    InitSection,
    MetricsConfig,
    ModelSection,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from mindvl_train.config import FaultsConfig

MODEL = smallest_config()
SCHEDULE = {"steps": 10, "peak_lr": 1e-3}


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (ModelSection, {}, "must set size, or directory, or vision and language"),
        (ModelSection, {"size": "tiny", "vision": MODEL.vision}, "must set size, or directory"),
        (ModelSection, {"vision": MODEL.vision}, "must set size, or directory"),
        (ModelSection, {"directory": Path("nowhere")}, "nowhere"),
        (ModelSection, {"size": "huge"}, r"model size: 'huge' is unknown. .*tiny"),
        (
            InitSection,
            {"checkpoint": Path("a"), "model": Path("b")},
            "must be a checkpoint, a model, or parts",
        ),
        (
            InitSection,
            {"model": Path("a"), "vision": Path("b")},
            "must be a checkpoint, a model, or parts",
        ),
        (
            InitSection,
            {"checkpoint": Path("a"), "language": Path("b")},
            "must be a checkpoint, a model, or parts",
        ),
        (ScheduleConfig, SCHEDULE | {"steps": 0}, "steps: must be between 1 and 1,000,000,000, got 0"),
        (ScheduleConfig, SCHEDULE | {"min_lr": 0.1}, r"min_lr: must be between 0 and peak_lr=0\.001, got 0\.1"),
        (ScheduleConfig, SCHEDULE | {"min_lr": -1.0}, r"min_lr: must be between .* got -1\.0"),
        (ScheduleConfig, SCHEDULE | {"lr_warmup_ratio": 1.0}, r"lr_warmup_ratio: must be in \[0, 1\), got 1\.0"),
        (CheckpointConfig, {"every_steps": 0}, "every_steps: must be >= 1, got 0"),
        (CheckpointConfig, {"every_steps": 0, "keep_every_steps": 2}, "every_steps: must be >= 1, got 0"),
        (ScheduleConfig, SCHEDULE | {"peak_lr": math.inf}, "peak_lr: must be a finite number >= 0, got inf"),
        (OptimizerConfig, {"beta2": 1.0}, r"beta2: must be in \[0, 1\), got 1\.0"),
        (OptimizerConfig, {"clip_grad_norm": math.nan}, "clip_grad_norm: must be a finite number >= 0, got nan"),
        (OptimizerConfig, {"epsilon": 0.0}, r"epsilon: must be a finite number > 0, got 0\.0"),
        (MetricsConfig, {"wandb_project": ""}, "wandb_project: must not be empty"),
        (MetricsConfig, {"swanlab_project": ""}, "swanlab_project: must not be empty"),
        (FaultsConfig, {"max_skipped": 0}, "max_skipped: must be >= 1, got 0"),
        (FaultsConfig, {"stuck_after_s": -1.0}, r"stuck_after_s: must be between 0 .* got -1\.0"),
        (CheckpointConfig, {"keep_last": 0}, "keep_last: must be >= 1, got 0"),
        (MetricsConfig, {"every_steps": 0}, "every_steps: must be >= 1, got 0"),
        (MetricsConfig, {"peak_tflops": 0.0}, r"peak_tflops: must be > 0, got 0\.0"),
        (
            CheckpointConfig,
            {"every_steps": 10, "keep_every_steps": 0},
            "must be a positive multiple of every_steps=10, got 0",
        ),
        (FaultsConfig, {"spike_factor": float("nan")}, "spike_factor: must be a number > 1, got nan"),
        (ParallelConfig, {"ep_size": 1 << 30}, "ep_size: must be between 1 and 1,048,576, got 1073741824"),
        (
            ParallelConfig,
            {"pp_size": 2, "stage_layers": (-1, 5)},
            r"stage_layers: must be layer counts >= 0, got \[-1, 5\]",
        ),
    ],
)
def test_impossible_settings_are_refused(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_both_backbones_may_start_from_directories_of_their_own() -> None:
    assert InitSection(vision=Path("a"), language=Path("b")).checkpoint is None


def test_a_run_checks_what_its_sections_cannot(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    with pytest.raises(ValueError, match="global_batch_size: must be between 1 and 1,048,576, got 0"):
        replace(config, global_batch_size=0)
    with pytest.raises(ValueError, match=r"seed: must be between 0 and .* got -1"):
        replace(config, seed=-1)
    with pytest.raises(ValueError, match="trainable: must name at least one part"):
        replace(config, trainable=())
    image = replace(config.data.image, patch_size=16, min_pixels=32 * 32)
    with pytest.raises(ValueError, match=r"data\.image\.patch_size: is 16, but the model has 14"):
        replace(config, data=replace(config.data, image=image))


def test_the_phase_decides_what_is_trained_unless_it_is_named(make_config: Callable[..., RunConfig]) -> None:
    assert make_config(phase="warmup").trained_parts == ("projector",)
    assert set(make_config(phase="multitask").trained_parts) == {"vision", "projector", "language"}
    assert make_config(phase="warmup", trainable=("vision", "projector")).trained_parts == ("vision", "projector")


def test_a_section_resolves_to_a_model() -> None:
    assert ModelSection(size="tiny").resolved.language.num_layers == 4
    halves = ModelSection(vision=MODEL.vision, language=MODEL.language).resolved
    assert (halves.vision, halves.language) == (MODEL.vision, MODEL.language)


def test_properties_that_cannot_be_exported_are_refused_before_training() -> None:
    with pytest.raises(
        ValueError, match=r"language.mlp_bias: True cannot be stored in the config.json of the family qwen3"
    ):
        ModelSection(vision=MODEL.vision, language=replace(MODEL.language, mlp_bias=True))


@pytest.mark.parametrize(
    ("stored", "chosen", "reason"),
    [
        ({"dtype": "bfloat16"}, "bf16", r" \(as the weights of .*published\)"),
        ({"torch_dtype": "torch.float16"}, "bf16", "as the weights of"),
        ({"dtype": "float32"}, "fp32", "as the weights of"),
        ({"dtype": None, "text_config": {"dtype": "bfloat16"}}, "bf16", "as the weights of"),
        ({}, "fp32", "names no data type"),
    ],
)
def test_the_precision_follows_the_model_directory(
    make_config: Callable[..., RunConfig], tmp_path: Path, stored: dict[str, Any], chosen: str, reason: str
) -> None:
    directory = tmp_path / "published"
    save_qwen2_5_vl(smallest_qwen2_5_vl(vocab_size=264), directory)
    content = json.loads((directory / "config.json").read_text())
    for section in (content, content["text_config"]):
        for key in ("dtype", "torch_dtype"):
            section.pop(key, None)
    text = stored.pop("text_config", {})
    (directory / "config.json").write_text(
        json.dumps(content | stored | {"text_config": content["text_config"] | text})
    )
    found = make_config(model=ModelSection(directory=directory))
    assert found.precision == chosen
    assert re.search(reason, found.precision_reason)
    other: Any = "fp32" if chosen == "bf16" else "bf16"
    named = make_config(model=ModelSection(directory=directory), init=InitSection(model=directory), precision=other)
    assert named.precision == replace(named, seed=1).precision == other
    if "names" not in reason:
        assert f"the weights of {directory} are {chosen}" in named.precision_reason


def test_the_precision_is_fp32_without_a_model_directory(make_config: Callable[..., RunConfig]) -> None:
    found = make_config()
    assert (found.precision, found.precision_reason) == ("fp32", "")
