# SPDX-License-Identifier: Apache-2.0
"""Sizes of the demo: model, data, schedule and grid, for the full run, the quick one and the study.

Read by pipeline.py. The stages are the paper's in miniature (sections 5.2 to 5.4); the values come from the
experiments in docs/design/evidence/demo.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mindvl_cli.demo.tasks import Task
from mindvl_data.preprocessing import WITHOUT_MODEL
from mindvl_model import LanguagePreset, VisionConfig
from mindvl_model.sizes import DEMO_DECODER

BLOCK = WITHOUT_MODEL.token_pixels  # pixels of one visual token, the unit of all pixel limits here


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """One training source."""

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
    global_batch_size: int = 2
    num_processes: int = 2  # data-parallel processes; for a tiny model faster than threads
    max_pixels: int = 48  # visual tokens
    lr_warmup_ratio: float = 0.1


@dataclass(frozen=True, kw_only=True)
class VisionBackboneSettings:
    """Pre-training of the vision encoder on single digits, with a classification head that is discarded."""

    num_images: int
    steps: int
    batch_size: int
    peak_lr: float
    lr_warmup_ratio: float = 0.1
    weight_decay: float = 0.2
    label_smoothing: float = 0.1  # against overfitting: few scans, many epochs


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """All settings that affect the results of a demo, except the seed."""

    vision: VisionConfig
    language: LanguagePreset
    sources: Mapping[str, SourceSettings]
    vision_backbone: VisionBackboneSettings
    language_backbone: PhaseSettings
    warmup: PhaseSettings
    multitask: PhaseSettings
    sft: tuple[PhaseSettings, ...]  # same checkpoint, other lengths and image limits
    min_pixels: int = 4  # of training, in visual tokens
    grid_min: tuple[int, ...] = (1, 4, 8, 16)  # of the search, in visual tokens
    grid_max: tuple[int, ...] = (8, 16, 24, 48, 96)
    validation_items: int = 100  # by task
    test_items: int = 200  # by task
    headline_items: int = 500
    tokenizer_samples: int = 2000
    weight_decay: float = 0.05
    threads: int = 2  # fixed, because the order of summation depends on it


_MULTITASK = {"read": 0.60, "count": 0.06, "compare": 0.07, "locate": 0.07, "text": 0.20}
_SFT = {"read": 0.38, "count": 0.04, "compare": 0.04, "locate": 0.04, "text": 0.50}

FULL = DemoSettings(
    vision=VisionConfig(
        hidden_size=96,
        num_layers=4,
        num_heads=3,
        ffn_hidden_size=256,
        full_attention_layers=(0, 1, 2, 3),
        init_std=None,
    ),
    language=DEMO_DECODER,
    sources={
        "captions": SourceSettings(shares={"caption": 1}, num_samples=6000),
        "read": SourceSettings(shares={"read": 1}, num_samples=28000),
        "count": SourceSettings(shares={"count": 1}, num_samples=4000),
        "compare": SourceSettings(shares={"compare": 1}, num_samples=4000),
        "locate": SourceSettings(shares={"locate": 1}, num_samples=5000),
        "text": SourceSettings(shares={"arithmetic": 1, "copy": 1}, num_samples=20000),
    },
    vision_backbone=VisionBackboneSettings(num_images=40000, steps=2400, batch_size=96, peak_lr=3e-3),
    language_backbone=PhaseSettings(weights={"text": 1}, steps=600, peak_lr=3e-3, global_batch_size=1, num_processes=1),
    warmup=PhaseSettings(weights={"captions": 1}, steps=120, peak_lr=3e-3, global_batch_size=1, num_processes=1),
    multitask=PhaseSettings(weights=_MULTITASK, text_share=0.2, steps=1250, peak_lr=2e-3, min_lr=1e-4),
    sft=tuple(
        PhaseSettings(
            weights=_SFT,
            text_share=0.5,
            steps=110,
            peak_lr=8e-4,
            seq_length=length,
            max_pixels=pixels,
            global_batch_size=packs,
        )
        for length, pixels, packs in ((256, 24, 8), (512, 48, 4), (1024, 96, 2))
    ),
)

QUICK = replace(
    FULL,
    sources={
        name: replace(source, num_samples=max(150, source.num_samples // 20)) for name, source in FULL.sources.items()
    },
    vision_backbone=replace(FULL.vision_backbone, num_images=960, steps=20),
    language_backbone=replace(FULL.language_backbone, steps=10),
    warmup=replace(FULL.warmup, steps=5),
    multitask=replace(FULL.multitask, steps=20),
    sft=tuple(replace(phase, steps=5) for phase in FULL.sft),
    grid_min=(4, 16),
    grid_max=(16, 48),
    validation_items=4,
    test_items=8,
    headline_items=16,
    tokenizer_samples=500,
)

# Shorter than the demo, and one process and one thread without waiting for each other, so that five repetitions take less than
# an hour beside other programs. The learning rate of SFT is higher and the image budgets differ more: a page of a document has
# 16 to 80 visual tokens, so that only the longest run sees all of them at full size.
_STUDY_MULTITASK = {"read": 0.40, "document": 0.30, "count": 0.05, "compare": 0.05, "text": 0.20}
_STUDY_SFT = {"read": 0.20, "document": 0.22, "count": 0.04, "compare": 0.04, "text": 0.50}

STUDY = replace(
    FULL,
    sources={
        "captions": replace(FULL.sources["captions"], num_samples=1500),
        "read": replace(FULL.sources["read"], num_samples=8000),
        "count": replace(FULL.sources["count"], num_samples=1000),
        "compare": replace(FULL.sources["compare"], num_samples=1000),
        "text": replace(FULL.sources["text"], num_samples=8000),
        "document": SourceSettings(shares={"document": 1}, num_samples=6000),
    },
    vision_backbone=replace(FULL.vision_backbone, num_images=12000, steps=600),
    language_backbone=replace(FULL.language_backbone, steps=300),
    warmup=replace(FULL.warmup, steps=80),
    multitask=replace(FULL.multitask, weights=_STUDY_MULTITASK, steps=500, num_processes=1),
    sft=tuple(
        PhaseSettings(
            weights=_STUDY_SFT,
            text_share=0.5,
            steps=60,
            peak_lr=1.2e-3,
            seq_length=length,
            max_pixels=pixels,
            global_batch_size=packs,
            num_processes=1,
        )
        for length, pixels, packs in ((256, 16, 2), (512, 36, 1), (1024, 96, 1))
    ),
    grid_min=(1, 8, 16, 32),
    grid_max=(12, 24, 36, 48, 72, 108),
    validation_items=40,
    test_items=100,
    threads=1,
)
