# SPDX-License-Identifier: Apache-2.0
"""Parallel configuration of a model: group sizes, pipeline stage split and activation recomputation.

Plain numbers without megatron-core; comes before megatron/blocks.py, which builds the model from them.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from mindvl_model.config import MindVLConfig
from mindvl_model.errors import ModelError
from mindvl_model.language_config import ExpertsConfig

_MAX_SIZE = 1 << 20
# A smaller tensor of an offloaded layer stays on the device, because a copy would cost more than the memory it frees.
SMALLEST_OFFLOADED_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallel layout of a run. The data-parallel size is the number of processes / (tp_size * pp_size * cp_size)."""

    tp_size: int = 1  # tensor parallel size; sequence parallelism is enabled with it
    pp_size: int = 1  # pipeline stages; the vision encoder and the projector are on the first stage
    virtual_stages: int = 1  # model chunks on each pipeline rank (interleaved schedule)
    # Number of language layers in each model chunk, first to last (chunk c is on pipeline rank c % pp_size); None: as
    # even as possible.
    stage_layers: tuple[int, ...] | None = None
    # Context parallel size; all-to-all as in Ulysses: inside attention a rank has the whole sequence and some of the
    # heads.
    cp_size: int = 1
    ep_size: int = 1  # expert parallel size; experts are sharded over the tp, cp and dp ranks of a stage
    # Size of the messages between expert-parallel ranks, as a multiple of an even distribution: sizes are then fixed, and
    # the host does not wait for them; a step in which a message is too small is computed again. None: exact sizes.
    expert_capacity_factor: float | None = None
    overlap: bool = True  # overlap gradient reduction and parameter gathering with computation
    # Each tp and cp rank encodes a part of the images; None: enabled where it is estimated to be faster.
    spread_images: bool | None = None

    def __post_init__(self) -> None:
        for name in ("tp_size", "pp_size", "virtual_stages", "cp_size", "ep_size"):
            if not 1 <= getattr(self, name) <= _MAX_SIZE:
                raise ValueError(f"{name}: must be between 1 and {_MAX_SIZE:,}, got {getattr(self, name)}.")
        if self.virtual_stages > 1 and self.pp_size == 1:
            raise ValueError(
                f"virtual_stages: {self.virtual_stages} virtual stages require pp_size >= 2, got pp_size=1. "
                "Use virtual_stages=1 or a larger pp_size."
            )
        factor = self.expert_capacity_factor
        if factor is not None and not 1 <= factor <= _MAX_SIZE:
            raise ValueError(
                f"expert_capacity_factor: must be between 1 and {_MAX_SIZE:,}, got {factor}. Use 1.25 to 4, or null for exact "
                "sizes."
            )
        if self.stage_layers is None:
            return
        if min(self.stage_layers, default=0) < 0:
            raise ValueError(f"stage_layers: must be layer counts >= 0, got {list(self.stage_layers)}.")
        if len(self.stage_layers) != self.num_chunks:
            raise ValueError(
                f"stage_layers: must have pp_size * virtual_stages = {self.num_chunks} entries, "
                f"got {len(self.stage_layers)}. Give one layer count per chunk."
            )

    @property
    def model_parallel_size(self) -> int:
        """Size of a model-parallel group: the ranks that train the same packs."""
        return self.tp_size * self.pp_size * self.cp_size

    @property
    def sequence_parallel(self) -> bool:
        """Whether norms and dropout work on a slice of the sequence; always the case with tensor parallelism."""
        return self.tp_size > 1

    @property
    def num_chunks(self) -> int:
        """Number of consecutive model chunks: each pipeline rank has virtual_stages of them."""
        return self.pp_size * self.virtual_stages

    def padded_length(self, num_tokens: int) -> int:
        """Length to which the model pads a pack of num_tokens, so that every cp and tp rank has an equal slice."""
        slices = self.cp_size * self.tp_size
        return -(-num_tokens // slices) * slices


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Activation recomputation: which activations are recomputed in the backward pass instead of being stored."""

    # none: store all activations; selective: recompute core attention; full: recompute whole layers. Both also recompute
    # the logits.
    kind: Literal["none", "selective", "full"] = "none"
    # Number of language layers recomputed per chunk (kind full); None: all. The vision encoder is always recomputed
    # with kind full.
    layers: int | None = None
    # Number of leading language layers of each chunk whose stored activations are kept in host memory until the backward
    # pass (kind none or selective).
    offload_layers: int = 0

    def __post_init__(self) -> None:
        if self.offload_layers < 0:
            raise ValueError(f"offload_layers: must be >= 0, got {self.offload_layers}.")
        if self.offload_layers and self.kind == "full":
            raise ValueError(
                f"offload_layers: is {self.offload_layers}, but with kind: full no layer stores activations. Use kind: none or "
                "selective, or remove offload_layers."
            )
        if self.layers is not None and self.kind != "full":
            raise ValueError(f"layers: requires kind: full, got kind: {self.kind}. Remove layers or set kind: full.")
        if self.layers is not None and self.layers < 1:
            raise ValueError(f"layers: must be >= 1, got {self.layers}.")


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """How a model is built on one rank: parallel layout, recomputation and data type; the default is one fp32 process."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    dtype: torch.dtype = torch.float32
    seq_length: int | None = None  # most tokens of a packed sequence; needed with an expert_capacity_factor

    @property
    def for_vision(self) -> "BuildConfig":
        """For vision encoder and projector: one stage, and no tensor parallelism if images are spread over ranks."""
        tp_size = 1 if self.parallel.spread_images else self.parallel.tp_size
        recompute = RecomputeConfig(kind=self.recompute.kind)
        return replace(self, parallel=ParallelConfig(tp_size=tp_size), recompute=recompute)


def chunk_layers(num_layers: int, parallel: ParallelConfig) -> tuple[int, ...]:
    """Language layers of each model chunk, first to last; chunk c is on pipeline rank c % pp_size.

    Without stage_layers the split is even. The remainder goes to the last chunks, because the first chunk also has
    the vision encoder.

    Raises:
        ModelError: A pipeline rank would have no layer, or stage_layers does not add up to num_layers.
    """
    if parallel.stage_layers is None:
        if parallel.pp_size > num_layers + 1 or parallel.virtual_stages > num_layers:
            raise ModelError(
                f"parallel.pp_size: pp_size={parallel.pp_size} with virtual_stages={parallel.virtual_stages} leaves "
                f"pipeline stages without any of the {num_layers} language layers. Use at most {num_layers} of each."
            )
        each, more = divmod(num_layers, parallel.num_chunks)
        return (each,) * (parallel.num_chunks - more) + (each + 1,) * more
    if sum(parallel.stage_layers) != num_layers:
        raise ModelError(
            f"parallel.stage_layers: {list(parallel.stage_layers)} add up to {sum(parallel.stage_layers)}, but the "
            f"language model has {num_layers} layers. Use layer counts that add up to {num_layers}."
        )
    return parallel.stage_layers


@dataclass(frozen=True, kw_only=True)
class ExpertBlocks:
    """Rows of tokens that a rank sends to each expert-parallel rank in a message of fixed size."""

    rows: int
    most_rows: int  # always enough: those of all tokens, with as many of their experts on one rank as possible

    @property
    def can_overflow(self) -> bool:
        """Whether some routing has more rows for a rank."""
        return self.rows < self.most_rows


def even_rows(experts: ExpertsConfig, parallel: ParallelConfig, seq_length: int) -> float:
    """Rows that a rank sends to each expert-parallel rank if all experts get equally many."""
    slices = parallel.tp_size * parallel.cp_size
    return parallel.padded_length(seq_length) // slices * experts.experts_per_token / parallel.ep_size


def expert_blocks(
    experts: ExpertsConfig | None, parallel: ParallelConfig, seq_length: int | None
) -> ExpertBlocks | None:
    """Sizes of the expert messages of a parallel layout; None: exact sizes, or no messages.

    Args:
        seq_length: Most tokens of a packed sequence, the same on every rank, so that every message has one size.
    """
    factor, size = parallel.expert_capacity_factor, parallel.ep_size
    if experts is None or size == 1 or factor is None:
        return None
    assert seq_length is not None, "BuildConfig.seq_length is needed with an expert_capacity_factor"
    chosen = experts.experts_per_token
    tokens = parallel.padded_length(seq_length) // (parallel.tp_size * parallel.cp_size)
    most = tokens * min(chosen, experts.num_experts // size)
    rows = min(math.ceil(factor * even_rows(experts, parallel, seq_length)), most)
    # The padding of all blocks together is a number of whole tokens, each with rows for all of its experts.
    unit = chosen // math.gcd(chosen, size)
    return ExpertBlocks(rows=-(-rows // unit) * unit, most_rows=most)


def carried_features(config: MindVLConfig, parallel: ParallelConfig) -> int:
    """Number of deepstack features in the messages between pipeline stages: those for layers after the first chunk.

    The messages of a run have one shape, so every message has as many as the first one.
    """
    if parallel.pp_size == 1:
        return 0
    return max(0, len(config.vision.deepstack_layers) - chunk_layers(config.language.num_layers, parallel)[0])


def check_parallel(config: MindVLConfig, parallel: ParallelConfig) -> None:
    """Check that a model can be split by these sizes, before anything is built.

    Raises:
        ModelError: A size of the model is not divisible; the message names it.
    """
    language, vision, tp_size = config.language, config.vision, parallel.tp_size
    slices = tp_size * parallel.cp_size
    if language.num_heads % slices:
        raise ModelError(
            f"parallel: tp_size={tp_size} * cp_size={parallel.cp_size} = {slices} does not divide "
            f"language.num_heads={language.num_heads}. Use sizes whose product divides it."
        )
    divisible = {"language.ffn_hidden_size": language.ffn_hidden_size, "language.vocab_size": language.vocab_size}
    experts = language.experts
    if experts is not None:
        shared = experts.expert_ffn_hidden_size * experts.num_shared_experts
        divisible["language.expert_ffn_hidden_size * num_shared_experts"] = shared
    if not parallel.spread_images:
        divisible |= {"vision.num_heads": vision.num_heads, "vision.ffn_hidden_size": vision.ffn_hidden_size}
        divisible["vision.hidden_size * spatial_merge_size**2"] = vision.hidden_size * vision.spatial_merge_size**2
    for name, size in divisible.items():
        if size % tp_size:
            remedy = " or spread_images: true" if name.startswith("vision") else ""
            raise ModelError(f"parallel.tp_size: {tp_size} does not divide {name}={size}. Use a divisor{remedy}.")
    kv_heads = language.attention.num_kv_heads if language.attention.kind == "grouped_query" else tp_size
    if kv_heads % tp_size and tp_size % kv_heads:
        raise ModelError(
            f"parallel.tp_size: {tp_size} is neither a divisor nor a multiple of language.num_kv_heads={kv_heads}. "
            "Use a divisor or a multiple."
        )
    _check_experts(0 if experts is None else experts.num_experts, parallel.ep_size)
    if parallel.pp_size > 1 and language.tie_embeddings and language.num_mtp_layers:
        raise ModelError(
            f"parallel.pp_size: {parallel.pp_size} with tied embeddings and num_mtp_layers={language.num_mtp_layers}: the last "
            "stage would hold the embedding twice, which megatron-core cannot save. Use pp_size=1 or num_mtp_layers=0."
        )
    chunk_layers(language.num_layers, parallel)


def _check_experts(num_experts: int, ep_size: int) -> None:
    if ep_size > 1 and not num_experts:
        raise ModelError(f"parallel.ep_size: {ep_size}, but the model has no experts. Use 1.")
    if num_experts % ep_size:
        raise ModelError(f"parallel.ep_size: {ep_size} does not divide num_experts={num_experts}. Use a divisor.")
