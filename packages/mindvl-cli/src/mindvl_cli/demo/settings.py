# SPDX-License-Identifier: Apache-2.0
"""Sizes of the demo: model, data, schedule and grid, for the full run and the quick one.

Read by pipeline.py. The stages are the paper's in miniature (sections 5.2 to 5.4); the figures come from experiments
whose results stand in docs/demo.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mindvl_cli.demo.tasks import Task
from mindvl_model import Qwen3LanguageConfig, VisionConfig

BLOCK = 28 * 28  # pixels of one visual token, the unit of all pixel limits here


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """One training source and how it is made."""

    shares: Mapping[Task, float]  # weight of each task
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class PhaseSettings:
    """One training stage."""

    weights: Mapping[str, float]  # source -> weight
    steps: int
    peak_lr: float
    min_lr: float = 0.0
    text_share: float | None = None  # share of text-only samples
    seq_length: int = 1024
    packs_per_step: int = 1
    max_pixels: int = 24  # visual tokens
    lr_warmup_ratio: float = 0.1


@dataclass(frozen=True, kw_only=True)
class VisionBackboneSettings:
    """Pre-training of the vision tower on single digits, with a head that is thrown away."""

    num_pictures: int
    steps: int
    batch_size: int
    peak_lr: float
    lr_warmup_ratio: float = 0.1
    weight_decay: float = 0.05


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Everything that decides what a demo computes, except the seed."""

    vision: VisionConfig
    language: Qwen3LanguageConfig
    sources: Mapping[str, SourceSettings]
    vision_backbone: VisionBackboneSettings
    language_backbone: PhaseSettings
    warmup: PhaseSettings
    multitask: PhaseSettings
    sft: tuple[PhaseSettings, ...]  # same checkpoint, other lengths and picture limits
    min_pixels: int = 2  # of training, in visual tokens
    grid_min: tuple[int, ...] = (2, 8, 16)  # of the search, in visual tokens
    grid_max: tuple[int, ...] = (8, 16, 24, 48, 96)
    validation_items: int = 40  # by task
    test_items: int = 200  # by task
    headline_items: int = 500
    tokenizer_samples: int = 2000
    weight_decay: float = 0.05
    threads: int = field(default=2)  # fixed, because the order of sums depends on it


FULL = DemoSettings(
    vision=VisionConfig(
        hidden_size=96,
        num_layers=4,
        num_heads=3,
        ffn_hidden_size=256,
        full_attention_layers=(1, 3),
        init_std=0.08,
    ),
    language=Qwen3LanguageConfig(
        hidden_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        ffn_hidden_size=384,
        vocab_size=512,
        tie_embeddings=True,
        rotary_base=10000.0,
        max_positions=4096,
        init_std=0.08,
    ),
    sources={
        "captions": SourceSettings(shares={"caption": 1}, num_samples=6000),
        "pages": SourceSettings(shares={"read": 7, "count": 1, "compare": 1.5, "locate": 1.5}, num_samples=24000),
        "text": SourceSettings(shares={"arithmetic": 1, "copy": 1}, num_samples=12000),
    },
    vision_backbone=VisionBackboneSettings(num_pictures=24000, steps=2000, batch_size=96, peak_lr=3e-3),
    language_backbone=PhaseSettings(weights={"text": 1}, steps=300, peak_lr=2e-3),
    warmup=PhaseSettings(weights={"captions": 1}, steps=150, peak_lr=2e-3),
    multitask=PhaseSettings(
        weights={"captions": 1, "pages": 7, "text": 2}, text_share=0.2, steps=1500, peak_lr=2e-3, min_lr=2e-4
    ),
    sft=tuple(
        PhaseSettings(
            weights={"pages": 1, "text": 1},
            text_share=0.5,
            steps=steps,
            peak_lr=5e-4,
            seq_length=length,
            max_pixels=pixels,
            packs_per_step=packs,
        )
        for length, pixels, packs, steps in ((256, 12, 4, 150), (512, 24, 2, 150), (1024, 48, 1, 150))
    ),
)

QUICK = replace(
    FULL,
    sources={
        "captions": SourceSettings(shares={"caption": 1}, num_samples=600),
        "pages": SourceSettings(shares={"read": 7, "count": 1, "compare": 1.5, "locate": 1.5}, num_samples=1500),
        "text": SourceSettings(shares={"arithmetic": 1, "copy": 1}, num_samples=1000),
    },
    vision_backbone=replace(FULL.vision_backbone, num_pictures=960, steps=20),
    language_backbone=replace(FULL.language_backbone, steps=10),
    warmup=replace(FULL.warmup, steps=5),
    multitask=replace(FULL.multitask, steps=20),
    sft=tuple(replace(phase, steps=5) for phase in FULL.sft),
    grid_min=(2, 16),
    grid_max=(16, 48),
    validation_items=4,
    test_items=8,
    headline_items=16,
    tokenizer_samples=500,
)
