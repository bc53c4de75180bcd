# SPDX-License-Identifier: Apache-2.0
"""Everything one training run is told, as one tree of frozen dataclasses.

Comes from a recipe through mindvl_cli; run.py hands each object the part it uses.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mindvl_data import DataConfig
from mindvl_model import LanguageConfig, MindVLConfig, ModelError, TokenConfig, VisionConfig, named_config
from mindvl_model.hf.directory_config import config_from_directory
from mindvl_ops import OpsConfig

Phase = Literal["warmup", "multitask", "sft"]
Part = Literal["vision", "projector", "language"]
Precision = Literal["fp32", "bf16"]

_MAX_PROCESSES = 1 << 20  # these two are beyond anything that is trained, and what a step is planned in
_MAX_PACKS = 1 << 20

# Paper, Table 1: the warm-up trains the projector, the later phases everything.
TRAINABLE: dict[Phase, tuple[Part, ...]] = {
    "warmup": ("projector",),
    "multitask": ("vision", "projector", "language"),
    "sft": ("vision", "projector", "language"),
}


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Which model: a named size, that of an exported directory, or two halves. Token ids come from the tokenizer."""

    size: str | None = None  # a name such as "tiny" or "mindvl-8b"
    directory: Path | None = None  # MindVL or Qwen2.5-VL; its weights are taken only where init.model names it too
    vision: VisionConfig | None = None  # in place of size and directory
    language: LanguageConfig | None = None  # in place of size and directory

    def __post_init__(self) -> None:
        halves = (self.vision is not None, self.language is not None)
        if (self.size is not None) + (self.directory is not None) + any(halves) != 1 or any(halves) != all(halves):
            raise ValueError("give either size, or directory, or both vision and language. Keep one of the three.")
        if self.size is not None or self.directory is not None:
            try:
                self.resolve()
            except ModelError as error:
                raise ValueError(str(error)) from None

    def resolve(self) -> MindVLConfig:
        """The model before it knows its tokenizer."""
        if self.size is not None:
            return named_config(self.size)
        if self.directory is not None:
            return config_from_directory(self.directory)
        assert self.vision is not None
        assert self.language is not None
        return MindVLConfig(
            vision=self.vision,
            language=self.language,
            tokens=TokenConfig(image=0, vision_start=0, vision_end=0, end_of_turn=0, pad=0),
        )


@dataclass(frozen=True, kw_only=True)
class InitSection:
    """Where weights come from before the first step; what is not named starts at random from `seed`."""

    checkpoint: Path | None = None  # a mindvl checkpoint of an earlier phase: all parts
    model: Path | None = None  # a transformers directory of a whole model (MindVL or Qwen2.5-VL)
    vision: Path | None = None  # a transformers directory whose vision encoder is taken (MindVL or Qwen2.5-VL)
    language: Path | None = None  # a transformers directory whose language model is taken (whole, or alone)

    def __post_init__(self) -> None:
        whole = [name for name in ("checkpoint", "model") if getattr(self, name) is not None]
        if len(whole) + (self.vision is not None or self.language is not None) > 1:
            raise ValueError("checkpoint, model and vision/language exclude each other. Keep one of the three.")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over the run: linear warm-up from zero, then a cosine down to the minimum."""

    steps: int  # optimizer updates in this run
    peak_lr: float  # learning rate after warm-up
    min_lr: float = 0.0  # learning rate at the last step
    lr_warmup_ratio: float = 0.1  # share of the steps spent on warm-up (paper, Table 1)

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 10**9:
            raise ValueError(f"steps={self.steps} must be between 1 and 1,000,000,000.")
        if not 0 <= self.peak_lr < math.inf:
            raise ValueError(f"peak_lr={self.peak_lr} is no learning rate. Use for example 1e-4.")
        if not 0 <= self.min_lr <= self.peak_lr:
            raise ValueError(f"min_lr={self.min_lr} must lie between 0 and peak_lr={self.peak_lr}. Change one of them.")
        if not 0 <= self.lr_warmup_ratio < 1:
            raise ValueError(f"lr_warmup_ratio={self.lr_warmup_ratio} is not a share below 1. Use for example 0.1.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay; biases and norms are not decayed."""

    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_grad_norm: float = 1.0  # over all parameters; 0 turns clipping off
    offload: bool = False  # keep its two moments in the memory of the host; slower, for when the device is full

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is no share below 1. Use for example 0.95.")
        for name in ("weight_decay", "clip_grad_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} is below 0 or no number. Use 0 to turn it off.")
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon={self.epsilon} is not above 0. Use for example 1e-8.")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a run is spread over its processes; what tp_size * pp_size * cp_size leaves of them is data parallel."""

    tp_size: int = 1  # tensor parallel: pieces of each matrix; norms then work on slices of the pack
    pp_size: int = 1  # pipeline stages; vision encoder and projector are on the first
    virtual_stages: int = 1  # model chunks on each pipeline rank, interleaved
    stage_layers: tuple[int, ...] | None = None  # language layers of each chunk, first to last; None: as even as can be
    cp_size: int = 1  # context parallel: slices of the pack, exchanged over heads inside attention
    ep_size: int = 1  # expert parallel: experts are spread over the ranks of tp, cp and dp
    overlap: bool = True  # reduce gradients and gather parameters while layers compute, where there are several ranks
    spread_images: bool | None = None  # each tp and cp peer encodes a part of the images; None: where it wins

    def __post_init__(self) -> None:
        for name in ("tp_size", "pp_size", "virtual_stages", "cp_size", "ep_size"):
            if not 1 <= getattr(self, name) <= _MAX_PROCESSES:
                raise ValueError(f"{name}={getattr(self, name)} must be between 1 and {_MAX_PROCESSES:,}.")
        if self.virtual_stages > 1 and self.pp_size == 1:
            raise ValueError(f"virtual_stages={self.virtual_stages} needs pp_size of 2 or more. Change one of them.")
        if self.stage_layers is not None and min(self.stage_layers, default=0) < 0:
            raise ValueError(
                f"stage_layers={list(self.stage_layers)} has a number below 0. Use 0 or more for each chunk."
            )
        chunks = self.pp_size * self.virtual_stages
        if self.stage_layers is not None and len(self.stage_layers) != chunks:
            raise ValueError(
                f"stage_layers names {len(self.stage_layers)} chunks, but pp_size * virtual_stages is {chunks}. "
                "Give one number for each chunk."
            )

    @property
    def model_parallel_size(self) -> int:
        """Processes that train the same packs together."""
        return self.tp_size * self.pp_size * self.cp_size


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Which activations are computed again in backward instead of being kept."""

    kind: Literal["none", "selective", "full"] = "none"  # nothing; the core of attention; whole layers
    layers: int | None = (
        None  # with full: how many of each chunk's language layers; None: all, and the vision_encoder's
    )

    def __post_init__(self) -> None:
        if self.layers is not None and (self.kind != "full" or self.layers < 1):
            raise ValueError(f"layers={self.layers} goes with kind: full and is 1 or more. Change one of them.")


@dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """What a run does when numbers or machines go wrong."""

    on_anomalous_step: Literal["stop", "skip"] = (
        "stop"  # loss or gradient norm not finite, or a spike: end, or leave it out
    )
    spike_factor: float | None = None  # a gradient norm this many times the median of the last 100 is a spike
    loss_spike_factor: float | None = None  # likewise a mean loss; losses move less than norms, so this is nearer to 1
    max_skipped: int = 10  # consecutive skipped steps before the run stops
    stuck_after_s: float = 600.0  # a part of a step that takes longer (a save: 3 times that) ends the run; 0: never

    def __post_init__(self) -> None:
        for name, usual in (("spike_factor", 10), ("loss_spike_factor", 2)):
            factor = getattr(self, name)
            if factor is not None and not factor > 1:  # nan compares with nothing
                raise ValueError(f"{name}={factor} calls every step a spike. Use for example {usual}.")
        if self.max_skipped < 1:
            raise ValueError(f"max_skipped={self.max_skipped} allows no step to be left out. Use 1 or more.")
        if not 0 <= self.stuck_after_s <= 1e7:
            raise ValueError(f"stuck_after_s={self.stuck_after_s} must be between 0 (no limit) and 1e7 seconds.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save and what to keep, under OUT/checkpoints. The last step is always saved."""

    every_steps: int = 1000
    keep_last: int = 2  # newest ones kept
    keep_every_steps: int | None = None  # those at multiples of this are kept for good
    in_background: bool = False  # train on while the files are written; costs a copy of the state in host memory

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep_last"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} saves nothing. Use 1 or more.")
        if self.keep_every_steps is not None and (
            self.keep_every_steps < 1 or self.keep_every_steps % self.every_steps
        ):
            raise ValueError(
                f"keep_every_steps={self.keep_every_steps} is not a multiple of every_steps={self.every_steps}, so "
                "some of what it names is never saved. Use a multiple."
            )


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """How often numbers are reduced over ranks and written."""

    every_steps: int = 10
    tensorboard: bool = True  # event files under OUT/tensorboard
    wandb_project: str | None = None  # also report to Weights & Biases, which must be installed
    peak_tflops: float | None = None  # of one device in bf16, for MFU; None: as the device's table says

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise ValueError(f"every_steps={self.every_steps} reports nothing. Use 1 or more.")
        if self.wandb_project == "":
            raise ValueError("wandb_project is empty. Name a project, or leave it out.")
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise ValueError(f"peak_tflops={self.peak_tflops} is no speed. Use TFLOP/s of one device, such as 376.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: one phase of training, from its weights to its last checkpoint."""

    phase: Phase  # decides which parts are trained
    out: Path  # directory of the run: checkpoints, metrics, resolved recipe
    data: DataConfig
    model: ModelSection
    schedule: ScheduleConfig
    global_batch_size: int  # packed packs in one global batch, over all data-parallel ranks
    init: InitSection = field(default_factory=InitSection)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)
    trainable: tuple[Part, ...] | None = None  # in place of what the phase trains
    precision: Precision = "fp32"  # of weights and activations; the optimizer keeps fp32
    seed: int = 0  # of weights that start at random

    def __post_init__(self) -> None:
        if not 1 <= self.global_batch_size <= _MAX_PACKS:
            raise ValueError(f"global_batch_size={self.global_batch_size} must be between 1 and {_MAX_PACKS:,}.")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed} must be between 0 and {(1 << 63) - 1}.")
        if self.trainable is not None and not self.trainable:
            raise ValueError("trainable is empty, so nothing would be trained. Name parts or leave it out.")
        vision = self.model.resolve().vision
        image = self.data.image
        for name in ("patch_size", "spatial_merge_size"):
            ours, theirs = getattr(vision, name), getattr(image, name)
            if ours != theirs:
                raise ValueError(f"data.image.{name}={theirs}, but the model's {name} is {ours}. Set them equal.")

    @property
    def trained_parts(self) -> tuple[Part, ...]:
        """The parts of the model this run trains."""
        return self.trainable if self.trainable is not None else TRAINABLE[self.phase]
