# SPDX-License-Identifier: Apache-2.0
"""Cost of each block of the model on one rank: parameters, bytes stored for backward, operations, communication.

Comes after packs.py, before memory.py and step_time.py. Bytes follow the autograd functions of mindvl_model and
mindvl_ops (docs/design/layout-search.md); operations follow mindvl_model.flops.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from mindvl_model import MindVLConfig
from mindvl_model.adapters import LoRAConfig
from mindvl_model.parallel_config import ParallelConfig, expert_blocks
from mindvl_model.parameters import PARTS, Part
from mindvl_model.vision.positions import Grid
from mindvl_model.vision.spread import assign_frames
from mindvl_train.layout_search.packs import Pack

Kernels = Literal["cpu", "cuda", "npu"]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one rank sends in a forward pass by process group; backward sends the same amount."""

    tp: float = 0.0  # all-gather and reduce-scatter of sequence slices, or all-reduce
    cp: float = 0.0  # all-to-all between heads and sequence slices
    ep: float = 0.0  # tokens to the ranks of their experts, and back

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(tp=self.tp + other.tp, cp=self.cp + other.cp, ep=self.ep + other.ep)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of the model on one rank, for one pack."""

    name: str
    part: Part
    dense: int = 0  # parameters without routed experts
    experts: int = 0  # parameters of the routed experts of this rank
    packed: int = 0  # of the parameters, frozen weights of linear layers that are quantized
    trained: bool = True
    adapters: int | None = None  # parameters of adapters, which are then all that is trained; at most, with tp_size > 1
    adapters_experts: int = 0  # of these, parameters of the routed experts of this rank
    kept: float = 0.0  # bytes kept from forward to backward
    routed: float = 0.0  # of these, bytes of routing and routed experts
    boundary: float = 0.0  # bytes of its input, which full recomputation stores
    forward_peak: float = 0.0  # peak bytes in forward, above those before the block
    backward_peak: float = 0.0  # peak bytes in backward, above those before its backward
    matmul: float = 0.0  # forward operations with weights
    first: float = 0.0  # of these, with inputs that need no gradient
    repeated: float = 0.0  # of these, those that backward computes again with any recomputation
    attention: float = 0.0  # forward operations between activations
    elementwise: float = 0.0  # bytes read and written by other forward operations
    sent: Traffic = Traffic()
    weights: bool = True  # whether backward computes weight gradients
    inputs: bool = True  # whether backward computes input gradients

    @property
    def trained_dense(self) -> int:
        """Trained parameters without those of routed experts, if the block is trained."""
        return self.dense if self.adapters is None else self.adapters - self.adapters_experts

    @property
    def trained_experts(self) -> int:
        """Trained parameters of the routed experts of this rank, if the block is trained."""
        return self.experts if self.adapters is None else self.adapters_experts

    @property
    def backward_matmul(self) -> float:
        """Backward operations with weights."""
        return (self.weights + self.inputs) * (self.matmul - self.first) + self.weights * self.first

    @property
    def backward_attention(self) -> float:
        """Backward operations between activations."""
        return 2 * self.inputs * self.attention


def joined(name: str, blocks: list[Block]) -> Block:
    """Combine consecutive blocks into one."""
    held = forward_peak = 0.0
    for block in blocks:
        forward_peak = max(forward_peak, held + block.forward_peak)
        held += block.kept
    backward_peak, above = 0.0, held
    for block in reversed(blocks):
        backward_peak = max(backward_peak, above - held + block.backward_peak)
        above -= block.kept
    return replace(
        blocks[0],
        name=name,
        dense=sum(block.dense for block in blocks),
        experts=sum(block.experts for block in blocks),
        packed=sum(block.packed for block in blocks),
        kept=held,
        routed=sum(block.routed for block in blocks),
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        matmul=sum(block.matmul for block in blocks),
        repeated=sum(block.repeated for block in blocks),
        attention=sum(block.attention for block in blocks),
        elementwise=sum(block.elementwise for block in blocks),
        sent=sum((block.sent for block in blocks), Traffic()),
    )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Inputs of the block costs."""

    model: MindVLConfig
    pack: Pack
    trained: tuple[Part, ...] = PARTS
    lora: LoRAConfig | None = None  # adapters of the trained parts
    wide: int = 2  # bytes of a weight and of an activation
    kernels: Kernels = "npu"
    tp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    spread_images: bool = False
    recompute: Literal["none", "selective", "full"] = "none"  # as RecomputeConfig.kind
    expert_imbalance: float = 1.0  # tokens of the busiest expert-parallel rank over the mean
    expert_capacity_factor: float | None = None  # as ParallelConfig.expert_capacity_factor

    @property
    def splits_heads(self) -> bool:
        """Whether one kernel makes tensors of their own of queries, keys and values: Triton on a GPU."""
        return self.kernels == "cuda"

    @property
    def tokens(self) -> int:
        """Tokens of the pack on this context-parallel rank."""
        slices = self.cp_size * self.tp_size
        return -(-self.pack.tokens // slices) * self.tp_size

    @property
    def sliced(self) -> int:
        """Tokens of this tensor-parallel rank between layers (sequence parallelism)."""
        return self.tokens // self.tp_size

    @property
    def pack_bytes(self) -> int:
        """Bytes of the hidden states [S, H] of this rank between layers."""
        return self.wide * self.sliced * self.model.language.hidden_size

    @cached_property
    def grids(self) -> tuple[Grid, ...]:
        """Images of the rank with most patches, without the blank image of packs without images."""
        if not self.spread_images:
            return self.pack.grids
        frames = [(1, height, width) for time, height, width in self.pack.grids for _ in range(time)]
        patches = [height * width for _, height, width in frames]
        parts = assign_frames(patches, self.tp_size * self.cp_size)
        fullest = max(parts, key=lambda part: sum(patches[frame] for frame in part))
        return tuple(frames[frame] for frame in fullest)

    @cached_property
    def patches(self) -> int:
        """Number of patches of these images."""
        return sum(time * height * width for time, height, width in self.grids)

    @cached_property
    def expert_block_rows(self) -> int | None:
        """Rows of all expert messages that a rank sends, and receives, with a fixed size; None: exact sizes."""
        parallel = ParallelConfig(
            tp_size=self.tp_size,
            cp_size=self.cp_size,
            ep_size=self.ep_size,
            expert_capacity_factor=self.expert_capacity_factor,
        )
        blocks = expert_blocks(self.model.language.experts, parallel, self.pack.tokens)
        return None if blocks is None else self.ep_size * blocks.rows

    @property
    def selective(self) -> bool:
        """Whether core attention is recomputed in backward."""
        return self.recompute == "selective"

    @property
    def loss_rows(self) -> int:
        """Tokens of this context-parallel rank that the output layer computes."""
        count = self.pack.tokens if self.pack.num_loss_tokens is None else self.pack.num_loss_tokens
        rows = max(1, -(-count // (16 * self.cp_size))) * 16
        return min(rows, self.tokens)

    @property
    def gradient_arrives(self) -> bool:
        """Whether the language model computes gradients of its input."""
        return "vision" in self.trained or "projector" in self.trained

    def ring(self, size: int) -> float:
        """Fraction of a tensor that a rank sends in a ring all-gather or reduce-scatter over `size` ranks."""
        return (size - 1) / size

    def weight_gradient(self, elements: float) -> float:
        """Bytes of a weight gradient before it is added to the buffer; on a CPU with an fp32 copy."""
        if self.lora is not None:
            return 0.0
        return elements * (self.wide + (4 if self.kernels == "cpu" and self.wide < 4 else 0))


def gated_activation(setting: Setting, tokens: float, ffn: float) -> tuple[float, float]:
    """Temporary bytes of SwiGLU with tokens * ffn outputs: (in forward, in backward).

    Backward starts after the input of the second matrix is freed: gradients of the output and of both halves, and their
    fp32 copies without a fused kernel.
    """
    values = tokens * ffn
    if setting.kernels != "cpu":  # torch_npu, or Triton on a GPU
        return setting.wide * values, 2 * setting.wide * values
    if setting.wide == 4:
        return 4 * values, 12 * values
    return 14 * values, 24 * values
