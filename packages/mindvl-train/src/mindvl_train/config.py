# SPDX-License-Identifier: Apache-2.0
"""Configuration of one training run as one tree of frozen dataclasses.

Comes from a recipe through mindvl_cli; resolved_run.py derives the remaining values from it.
"""

import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from mindvl_data import DataConfig
from mindvl_model import LanguagePreset, MindVLConfig, ModelError, TokenConfig, VisionConfig, named_config
from mindvl_model.adapters import LoRAConfig
from mindvl_model.adapters.targets import find_targets
from mindvl_model.families.registry import write_language
from mindvl_model.hf.directory_config import config_from_directory
from mindvl_model.parallel_config import ParallelConfig, RecomputeConfig
from mindvl_ops import OpsConfig
from mindvl_train.preprocessing import preprocessing_of
from mindvl_train.validation.config import ValidationConfig

Phase = Literal["warmup", "multitask", "sft"]
Part = Literal["vision", "projector", "language"]
Precision = Literal["fp32", "bf16"]

_MAX_BATCH_SIZE = 1 << 20
_BF16 = ("bfloat16", "float16")  # data types of model directories that are trained in bf16

# Paper, Table 1: the warm-up trains the projector, the later phases everything.
TRAINABLE: dict[Phase, tuple[Part, ...]] = {
    "warmup": ("projector",),
    "multitask": ("vision", "projector", "language"),
    "sft": ("vision", "projector", "language"),
}


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """A named size, a model directory, or the sections `vision` and `language`; special token ids come from the tokenizer."""

    size: str | None = None  # name of a predefined model, such as "tiny" or "mindvl-8b"
    # Model directory (transformers format) of a whole model; only its configuration is read. Set init.model to
    # load its weights.
    directory: Path | None = None
    # Vision encoder; used together with `language`, in place of `size` or `directory`.
    vision: VisionConfig | None = None
    # Language model of the family `kind`; used together with `vision`, in place of `size` or `directory`.
    language: LanguagePreset | None = None

    def __post_init__(self) -> None:
        parts = (self.vision is not None, self.language is not None)
        if (self.size is not None) + (self.directory is not None) + any(parts) != 1 or any(parts) != all(parts):
            raise ValueError(
                "size, directory, vision and language: must set size, or directory, or vision and language."
            )
        try:
            if self.language is not None and self.language.kind == "decoder":
                write_language(self.language)  # a model that cannot be exported is refused before it is trained
            _ = self.resolved
        except ModelError as error:
            raise ValueError(str(error)) from None

    @cached_property
    def resolved(self) -> MindVLConfig:
        """The model configuration, without the token ids of the tokenizer."""
        if self.size is not None:
            return named_config(self.size)
        if self.directory is not None:
            return config_from_directory(self.directory)
        assert self.vision is not None
        assert self.language is not None
        return MindVLConfig(
            vision=self.vision,
            language=self.language.decoder(),
            tokens=TokenConfig(image=0, vision_start=0, vision_end=0, end_of_turn=0, pad=0),
        )


@dataclass(frozen=True, kw_only=True)
class InitSection:
    """Initial weights. Parts without a source are initialized randomly from `seed`."""

    checkpoint: Path | None = None  # mindvl run or checkpoint that provides all parts
    model: Path | None = None  # transformers checkpoint of a whole model (MindVL, Qwen2.5-VL or Qwen3-VL)
    vision: Path | None = None  # transformers checkpoint of the vision encoder (MindVL, Qwen2.5-VL or Qwen3-VL)
    language: Path | None = None  # transformers checkpoint of the language model (alone or in a whole model)
    adapter: Path | None = None  # PEFT directory with the initial low-rank adapters; requires the section `adapter`

    def __post_init__(self) -> None:
        whole = [name for name in ("checkpoint", "model") if getattr(self, name) is not None]
        if len(whole) + (self.vision is not None or self.language is not None) > 1:
            raise ValueError(
                "checkpoint, model, vision and language: must be a checkpoint, a model, or parts (vision, language), not several."
            )


@dataclass(frozen=True, kw_only=True)
class PartRates:
    """Peak learning rates of parts of the model that differ from `schedule.peak_lr`; the whole schedule is scaled."""

    vision: float | None = None  # peak learning rate of the vision encoder; None: peak_lr
    projector: float | None = None  # peak learning rate of the projector; None: peak_lr
    language: float | None = None  # peak learning rate of the language model; None: peak_lr
    # Peak learning rate of the token embedding, also if the output layer is tied to it; None: that of `language`.
    embedding: float | None = None
    head: float | None = None  # peak learning rate of the output layer; None: that of `language`

    def __post_init__(self) -> None:
        for name, rate in vars(self).items():
            if rate is not None and not 0 <= rate < math.inf:
                raise ValueError(f"{name}: must be a finite number >= 0, got {rate}. Use for example 1e-6.")


@dataclass(frozen=True, kw_only=True)
class LayerDecay:
    """Layer-wise decay d of learning rates: layer i of L layers, from 0, has the factor d^(L - i); 1: no decay."""

    vision: float = 1.0  # decay of the vision encoder; its patch embedding has the factor d^(L + 1)
    language: float = 1.0  # decay of the language model; its token embedding has the factor d^(L + 1)

    def __post_init__(self) -> None:
        for name, decay in vars(self).items():
            if not 0 < decay <= 1:
                raise ValueError(f"{name}: must be in (0, 1], got {decay}. Use for example 0.9.")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate schedule: linear warm-up from zero, then cosine decay to min_lr."""

    steps: int  # optimizer steps in this run
    peak_lr: float  # learning rate after warm-up
    min_lr: float = 0.0  # learning rate at the last step
    lr_warmup_ratio: float = 0.1  # fraction of the steps used for warm-up (paper, Table 1)
    peak_lr_by_part: PartRates = field(default_factory=PartRates)  # Peak learning rates that differ from peak_lr.
    layer_decay: LayerDecay = field(default_factory=LayerDecay)  # Lower learning rates of earlier layers.

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 10**9:
            raise ValueError(f"steps: must be between 1 and 1,000,000,000, got {self.steps}.")
        if not 0 <= self.peak_lr < math.inf:
            raise ValueError(f"peak_lr: must be a finite number >= 0, got {self.peak_lr}. Use for example 1e-4.")
        if not 0 <= self.min_lr <= self.peak_lr:
            raise ValueError(f"min_lr: must be between 0 and peak_lr={self.peak_lr}, got {self.min_lr}.")
        if not 0 <= self.lr_warmup_ratio < 1:
            raise ValueError(f"lr_warmup_ratio: must be in [0, 1), got {self.lr_warmup_ratio}. Use for example 0.1.")
        if not self.peak_lr and any(vars(self.peak_lr_by_part).values()):
            raise ValueError("peak_lr_by_part: scales peak_lr, which is 0. Set peak_lr to the rate of the other parts.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay; biases and norms are not decayed."""

    weight_decay: float = 0.1  # decoupled weight decay; 0 turns it off
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    epsilon: float = 1e-8  # added to the denominator
    clip_grad_norm: float = 1.0  # maximum global gradient norm; 0 disables clipping
    offload: bool = False  # keep optimizer moments in host memory; saves device memory, but is slower

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: must be in [0, 1), got {getattr(self, name)}. Use for example 0.95.")
        for name in ("weight_decay", "clip_grad_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}: must be a finite number >= 0, got {getattr(self, name)}. Use 0 to disable it."
                )
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon: must be a finite number > 0, got {self.epsilon}. Use for example 1e-8.")


@dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """Handling of anomalous steps and of processes that stop responding."""

    # Stop the run or skip the update of a step whose loss or gradient norm is not finite or is a spike.
    on_anomalous_step: Literal["stop", "skip"] = "stop"
    # A gradient norm above this multiple of the median over the last 100 normal steps is a spike; checked once 10
    # such steps exist; None: no spike detection.
    spike_factor: float | None = None
    # A mean loss above this multiple of the median over the last 100 normal steps is a spike; checked once 10 such
    # steps exist; None: no spike detection.
    loss_spike_factor: float | None = None
    max_skipped: int = 10  # consecutive skipped steps before the run stops
    # Seconds without progress after which a process ends the run; a save, or a group of packs of a validation, may
    # take 3 times as long; 0: no limit.
    stuck_after_s: float = 600.0

    def __post_init__(self) -> None:
        for name, usual in (("spike_factor", 10), ("loss_spike_factor", 2)):
            factor = getattr(self, name)
            if factor is not None and not factor > 1:  # also true for nan
                raise ValueError(f"{name}: must be a number > 1, got {factor}. Use for example {usual}.")
        if self.max_skipped < 1:
            raise ValueError(f"max_skipped: must be >= 1, got {self.max_skipped}.")
        if not 0 <= self.stuck_after_s <= 1e7:
            raise ValueError(f"stuck_after_s: must be between 0 (no limit) and 1e7 seconds, got {self.stuck_after_s}.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved under OUT/checkpoints and which are kept. The last step is always saved."""

    every_steps: int = 1000  # optimizer steps between two checkpoints
    keep_last: int = 2  # number of newest checkpoints to keep
    # Keep the checkpoint with the lowest validation loss too; OUT/checkpoints/best is a link to it. Without a
    # `validation` section it has no effect.
    keep_best: bool = True
    keep_every_steps: int | None = None  # Also keep every checkpoint whose step is a multiple of this; None: none.
    async_save: bool = False  # continue training while files are written; needs a copy of the state in host memory

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep_last"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be >= 1, got {getattr(self, name)}.")
        if self.keep_every_steps is not None and (
            self.keep_every_steps < 1 or self.keep_every_steps % self.every_steps
        ):
            raise ValueError(
                f"keep_every_steps: must be a positive multiple of every_steps={self.every_steps}, "
                f"got {self.keep_every_steps}."
            )


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """How often metrics are reduced over ranks and written."""

    every_steps: int = 10  # optimizer steps between two reports
    tensorboard: bool = True  # event files under OUT/tensorboard
    wandb_project: str | None = None  # also log to Weights & Biases; requires the wandb package
    swanlab_project: str | None = None  # also log to SwanLab; requires the swanlab package
    # bf16 peak of one device in TFLOP/s, for MFU; None: from the device table; without MFU if the device is not in
    # it.
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise ValueError(f"every_steps: must be >= 1, got {self.every_steps}.")
        for name in ("wandb_project", "swanlab_project"):
            if getattr(self, name) == "":
                raise ValueError(f"{name}: must not be empty. Name a project, or remove it.")
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise ValueError(
                f"peak_tflops: must be > 0, got {self.peak_tflops}. Use the TFLOP/s of one device, such as 376."
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: one training phase, from its initial weights to its last checkpoint."""

    # Training phase; sets the default of `trainable`: warmup trains the projector, multitask and sft train all parts.
    phase: Phase
    out: Path  # output directory: checkpoints, metrics, resolved recipe
    data: DataConfig
    model: ModelSection
    schedule: ScheduleConfig
    global_batch_size: int  # packed sequences per optimizer step, over all data-parallel ranks
    init: InitSection = field(default_factory=InitSection)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)
    validation: ValidationConfig | None = None  # Loss on held-out samples while the run trains; None: none.
    trainable: tuple[Part, ...] | None = None  # parts that are trained; None: those of the phase
    adapter: LoRAConfig | None = None  # train low-rank adapters of these parts, with all weights frozen; None: weights
    # Data type of weights and activations; master weights and optimizer states are fp32. Default: that of the model
    # directory (init.model, else model.directory), bf16 for 16-bit weights; fp32 without a directory.
    precision: Precision = None  # type: ignore[assignment]
    seed: int = 0  # Random seed of the initial weights; `data.seed` sets the data order.

    def __post_init__(self) -> None:
        if self.precision is None:
            object.__setattr__(self, "precision", precision_of(self.weights_directory) or "fp32")
        if not 1 <= self.global_batch_size <= _MAX_BATCH_SIZE:
            raise ValueError(
                f"global_batch_size: must be between 1 and {_MAX_BATCH_SIZE:,}, got {self.global_batch_size}."
            )
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed: must be between 0 and {(1 << 63) - 1}, got {self.seed}.")
        if self.trainable is not None and not self.trainable:
            raise ValueError("trainable: must name at least one part. Name the parts to train, or remove it.")
        self._check_rates()
        self._check_adapter()
        # The fields that the recipe leaves out are those of the model.
        object.__setattr__(self, "data", self.data.for_model(preprocessing_of(self.model.resolved.vision)))
        for name in ("patch_size", "spatial_merge_size"):
            model_size, data_size = getattr(self.model.resolved.vision, name), getattr(self.data.image, name)
            if model_size != data_size:
                raise ValueError(
                    f"data.image.{name}: is {data_size}, but the model has {model_size}. Set data.image.{name}={model_size}."
                )

    def _check_adapter(self) -> None:
        if self.adapter is None and self.init.adapter is not None:
            raise ValueError(
                f"init.adapter: is {self.init.adapter}, but the recipe has no section adapter. Add adapter with the rank, alpha "
                "and targets of its adapter_config.json."
            )
        if self.adapter is not None:
            try:
                find_targets(self.model.resolved, self.adapter, self.trained_parts)
            except ModelError as error:
                raise ValueError(str(error)) from None

    def _check_rates(self) -> None:
        """Refuse rates of parts that are not trained or have no parameters of their own."""
        for name, rate in vars(self.schedule.peak_lr_by_part).items():
            part = name if name in ("vision", "projector") else "language"
            if rate is not None and part not in self.trained_parts:
                raise ValueError(
                    f"schedule.peak_lr_by_part.{name}: is {rate}, but {part} is not trained. Remove it, or add {part} to "
                    "trainable."
                )
        if self.schedule.peak_lr_by_part.head is not None and self.model.resolved.language.tie_embeddings:
            raise ValueError(
                f"schedule.peak_lr_by_part.head: is {self.schedule.peak_lr_by_part.head}, but the output layer is tied to the "
                "embedding. Set schedule.peak_lr_by_part.embedding."
            )

    @property
    def weights_directory(self) -> Path | None:
        """The model directory that the precision follows; None: there is none."""
        return self.init.model if self.init.model is not None else self.model.directory

    @property
    def precision_reason(self) -> str:
        """In parentheses: whether the precision is that of the model directory; empty without a directory."""
        directory = self.weights_directory
        if directory is None:
            return ""
        stored = precision_of(directory)
        if stored is None:
            return f" ({directory} names no data type)"
        same = f"as the weights of {directory}"
        return f" ({same if stored == self.precision else f'the weights of {directory} are {stored}'})"

    @property
    def trained_parts(self) -> tuple[Part, ...]:
        """The parts of the model this run trains."""
        return self.trainable if self.trainable is not None else TRAINABLE[self.phase]


def precision_of(directory: Path | None) -> Precision | None:
    """The precision that a model directory is trained in; None if there is no directory or it names no data type."""
    if directory is None:
        return None
    try:
        content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the file is read again, with an error, when the weights are
        return None
    sections = [content, content.get("text_config")] if isinstance(content, dict) else []
    found = [one.get("dtype") or one.get("torch_dtype") for one in sections if isinstance(one, dict)]
    name = next((str(one).removeprefix("torch.") for one in found if one), None)
    return None if name is None else "bf16" if name in _BF16 else "fp32"
