# SPDX-License-Identifier: Apache-2.0
"""Requests of a layout search in the units of a user: image limits, token budgets, training days.

Comes after search.py. `Request.task` converts a request to the input of the search.
"""

from dataclasses import dataclass, replace
from typing import Any

from mindvl_model import MindVLConfig
from mindvl_model.adapters import LoRAConfig
from mindvl_model.parameters import Part
from mindvl_train.config import TRAINABLE, Phase, RunConfig
from mindvl_train.errors import TrainError
from mindvl_train.layout_search.packs import (
    LOSS_SHARE,
    SEGMENT_TOKENS,
    VISUAL_LIMIT,
    VISUAL_OF_PICTURED,
    VISUAL_SHARE,
    Pack,
    typical_pack,
)
from mindvl_train.layout_search.search import Candidate, Task, evaluate
from mindvl_train.layout_search.step_time import Machine
from mindvl_train.preprocessing import preprocessing_of

SEQUENCE_LENGTHS = (2048, 4096, 8192, 16384, 32768)
_SECONDS_PER_DAY = 86400

_OF_MODEL: Any = None

# Paper, Table 1: tokens of the three phases by model, and global batch sizes.
BUDGETS: dict[str, dict[Phase, float]] = {
    "mindvl-8b": {"warmup": 256e9, "multitask": 179e9, "sft": 12e9},
    "mindvl-671b-a37b": {"warmup": 16e9, "multitask": 80e9, "sft": 12e9},
}
BATCHES: dict[Phase, int] = {"warmup": 1024, "multitask": 1024, "sft": 512}


@dataclass(frozen=True, kw_only=True)
class Request:
    """Model, machine and data limits of a layout search."""

    model: MindVLConfig
    machine: Machine
    seq_length: int = 8192
    max_pixels: int = _OF_MODEL  # maximum pixels of one image; default: that of the model's preprocessing
    max_patches: int | None = None  # maximum patches of a pack; None: 1.25 times the average, at least one image
    visual_share: float = VISUAL_SHARE  # fraction of all tokens that are visual
    segment_tokens: int = SEGMENT_TOKENS
    global_batch_size: int = 1024
    trained: tuple[Part, ...] = TRAINABLE["multitask"]
    lora: LoRAConfig | None = None  # adapters of the trained parts
    wide: int = 2
    expert_capacity_factor: float | None = None  # of all layouts of the search

    def __post_init__(self) -> None:
        if self.max_pixels is None:
            default = preprocessing_of(self.model.vision).image_fields()["max_pixels"]
            object.__setattr__(self, "max_pixels", default)

    @property
    def visual_limit(self) -> int:
        """Maximum number of visual tokens of a pack."""
        vision = self.model.vision
        if self.max_patches is not None:
            return min(self.seq_length, self.max_patches // vision.spatial_merge_size**2)
        image = self.max_pixels // (vision.patch_size * vision.spatial_merge_size) ** 2
        wanted = VISUAL_LIMIT * self.visual_share * self.seq_length
        return min(self.seq_length, round(max(wanted, image if self.visual_share else 0)))

    @property
    def full_pack(self) -> Pack:
        """A pack with the maximum number of images, of which every token may be a loss token."""
        return self._pack(self.visual_limit)

    def _pack(self, visual_tokens: float, loss_share: float = 1.0) -> Pack:
        return typical_pack(
            self.seq_length,
            max_pixels=self.max_pixels,
            vision=self.model.vision,
            visual_tokens=visual_tokens,
            segment_tokens=self.segment_tokens,
            loss_share=loss_share,
        )

    def task(self) -> Task:
        """The input of the search."""
        return Task(
            model=self.model,
            machine=self.machine,
            full_pack=self.full_pack,
            usual_pack=self._pack(min(self.visual_limit, self.visual_share * self.seq_length), LOSS_SHARE),
            global_batch_size=self.global_batch_size,
            trained=self.trained,
            lora=self.lora,
            wide=self.wide,
            expert_capacity_factor=self.expert_capacity_factor,
        )


def request_of(config: RunConfig, machine: Machine) -> Request:
    """The request of a recipe."""
    data = config.data
    request = Request(
        model=config.model.resolved,
        machine=machine,
        seq_length=data.packing.seq_length,
        max_pixels=data.image.max_pixels,
        max_patches=data.packing.max_patches,
        global_batch_size=config.global_batch_size,
        trained=config.trained_parts,
        lora=config.adapter,
        wide=2 if config.precision == "bf16" else 4,
        expert_capacity_factor=config.parallel.expert_capacity_factor,
    )
    if data.text_share is None:
        return request
    return replace(request, visual_share=VISUAL_OF_PICTURED * (1 - data.text_share))


@dataclass(frozen=True, kw_only=True)
class Room:
    """Image limit of a layout at one sequence length."""

    seq_length: int
    visual_tokens: int | None  # maximum of one pack; None: not even text fits

    def max_pixels(self, request: Request) -> int | None:
        """Pixels of one image with all visual tokens."""
        side = request.model.vision.patch_size * request.model.vision.spatial_merge_size
        return None if self.visual_tokens is None else self.visual_tokens * side**2


@dataclass(frozen=True, kw_only=True)
class Days:
    """Estimated duration of one phase."""

    phase: Phase
    tokens: float
    step_s: float
    days: float
    fits: bool  # whether it fits into memory in the same layout


def room(request: Request, candidate: Candidate, lengths: tuple[int, ...] = SEQUENCE_LENGTHS) -> list[Room]:
    """The maximum number of visual tokens with which a layout fits, for each sequence length."""

    def fits(seq_length: int, visual_tokens: int) -> bool:
        patches = visual_tokens * request.model.vision.spatial_merge_size**2
        pixels = visual_tokens * (request.model.vision.patch_size * request.model.vision.spatial_merge_size) ** 2
        asked = replace(
            request, seq_length=seq_length, max_patches=patches, max_pixels=min(request.max_pixels, max(pixels, 1))
        )
        return _fits(asked, candidate)

    found = []
    for seq_length in lengths:
        if not fits(seq_length, 0):
            found.append(Room(seq_length=seq_length, visual_tokens=None))
            continue
        low, high = 0, seq_length
        if fits(seq_length, high):
            low = high
        while high - low > seq_length // 64:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(seq_length, middle) else (low, middle)
        found.append(Room(seq_length=seq_length, visual_tokens=low))
    return found


def days(request: Request, candidate: Candidate, budgets: dict[Phase, float]) -> list[Days]:
    """Duration of each phase in a layout, with global batch size and trained parts of the paper."""
    found = []
    for phase, tokens in budgets.items():
        batch = BATCHES[phase]
        if batch % candidate.dp_size:
            batch = -(-batch // candidate.dp_size) * candidate.dp_size
        asked = replace(request, trained=TRAINABLE[phase], lora=None, global_batch_size=batch)
        timed = evaluate(asked.task(), candidate.parallel, candidate.recompute, offload=candidate.offload)
        steps = tokens / (batch * request.seq_length)
        found.append(
            Days(
                phase=phase,
                tokens=tokens,
                step_s=timed.time.total,
                days=steps * timed.time.total / _SECONDS_PER_DAY,
                fits=timed.memory[timed.fullest].total <= asked.task().limit,
            )
        )
    return found


def largest_pixels(request: Request, candidate: Candidate) -> int:
    """Largest max_pixels with which packs of the requested length fit.

    Raises:
        TrainError: Not even packs without images fit.
    """
    (found,) = room(request, candidate, (request.seq_length,))
    pixels = found.max_pixels(request)
    if pixels is None:
        raise TrainError(
            f"--seq-length: packs of {request.seq_length} tokens do not fit even without images. "
            "Use a shorter sequence length or more devices."
        )
    return pixels


def _fits(request: Request, candidate: Candidate) -> bool:
    task = request.task()
    tried = evaluate(task, candidate.parallel, candidate.recompute, offload=candidate.offload)
    return tried.memory[tried.fullest].total <= task.limit
