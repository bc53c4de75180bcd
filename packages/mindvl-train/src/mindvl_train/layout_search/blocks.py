# SPDX-License-Identifier: Apache-2.0
"""What each stretch of the model costs on one rank: parameters, bytes kept for backward, operations, traffic.

Comes after packs.py, before memory.py and step_time.py. Bytes follow the code of mindvl_model and mindvl_ops: what each
autograd function of a layer keeps, by name in docs/design/layout-search.md; operations follow mindvl_model.flops.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from mindvl_model import MindVLConfig
from mindvl_model.parameters import PARTS, Part
from mindvl_model.vision.positions import Grid
from mindvl_model.vision.spread import assign_frames
from mindvl_train.layout_search.packs import Pack

Kernels = Literal["cpu", "cuda", "npu"]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one rank sends in a forward pass, by the group they are sent in; backward sends as many."""

    tp: float = 0.0  # slices of the pack gathered and reduced, or sums over whole tensors
    cp: float = 0.0  # heads against slices of the pack
    ep: float = 0.0  # packs to the ranks of their experts, and back

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(tp=self.tp + other.tp, cp=self.cp + other.cp, ep=self.ep + other.ep)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A stretch of the model on one rank, for one pack."""

    name: str
    part: Part
    dense: int = 0  # parameters that every data-parallel rank holds
    experts: int = 0  # parameters of the routed experts of this rank
    trained: bool = True
    kept: float = 0.0  # bytes kept from forward to backward
    routed: float = 0.0  # of these, for routing and routed experts
    boundary: float = 0.0  # its input, all that recomputation of the whole block keeps
    forward_peak: float = 0.0  # bytes at most, above what was held before it
    backward_peak: float = 0.0  # bytes at most, above what is held when backward enters it
    matmul: float = 0.0  # operations of forward with weights
    first: float = 0.0  # of these, of data that takes no gradient
    attention: float = 0.0  # operations of forward between activations
    elementwise: float = 0.0  # bytes read and written by everything else in forward
    sent: Traffic = Traffic()
    weights: bool = True  # backward makes gradients of its weights
    inputs: bool = True  # backward makes gradients of its input

    @property
    def backward_matmul(self) -> float:
        """Operations of backward with weights."""
        return (self.weights + self.inputs) * (self.matmul - self.first) + self.weights * self.first

    @property
    def backward_attention(self) -> float:
        """Operations of backward between activations."""
        return 2 * self.inputs * self.attention


def joined(name: str, blocks: list[Block]) -> Block:
    """Blocks that run one after the other, as one."""
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
        kept=held,
        routed=sum(block.routed for block in blocks),
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        matmul=sum(block.matmul for block in blocks),
        attention=sum(block.attention for block in blocks),
        elementwise=sum(block.elementwise for block in blocks),
        sent=sum((block.sent for block in blocks), Traffic()),
    )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What blocks are counted for."""

    model: MindVLConfig
    pack: Pack
    trained: tuple[Part, ...] = PARTS
    wide: int = 2  # bytes of a weight and of an activation
    kernels: Kernels = "npu"
    tp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    spread_images: bool = False
    selective: bool = False  # the core of attention is computed again in backward
    expert_imbalance: float = 1.0  # packs that the busiest rank of experts gets, over the mean

    @property
    def tokens(self) -> int:
        """Of the pack on this context-parallel rank."""
        slices = self.cp_size * self.tp_size
        return -(-self.pack.tokens // slices) * self.tp_size

    @property
    def sliced(self) -> int:
        """Of these, what this tensor-parallel rank has between the layers."""
        return self.tokens // self.tp_size

    @cached_property
    def grids(self) -> tuple[Grid, ...]:
        """Images that the fullest peer encodes; the blank image of a pack without any is left out."""
        if not self.spread_images:
            return self.pack.grids
        frames = [(1, height, width) for time, height, width in self.pack.grids for _ in range(time)]
        patches = [height * width for _, height, width in frames]
        parts = assign_frames(patches, self.tp_size * self.cp_size)
        fullest = max(parts, key=lambda part: sum(patches[frame] for frame in part))
        return tuple(frames[frame] for frame in fullest)

    @cached_property
    def patches(self) -> int:
        """That the fullest peer encodes."""
        return sum(time * height * width for time, height, width in self.grids)

    @property
    def gradient_arrives(self) -> bool:
        """Whether the language model passes a gradient on to what comes before it."""
        return "vision" in self.trained or "projector" in self.trained

    def ring(self, size: int) -> float:
        """Share of a tensor that a rank sends when `size` ranks gather or reduce it."""
        return (size - 1) / size

    def weight_gradient(self, elements: float) -> float:
        """Bytes of the gradient of one weight until it is added to the buffer; a CPU widens it for that."""
        return elements * (self.wide + (4 if self.kernels == "cpu" and self.wide < 4 else 0))


def gated_activation(setting: Setting, packs: float, ffn: float) -> tuple[float, float]:
    """Bytes that SwiGLU needs beside what is kept: (in forward, in backward); packs times ffn values come out.

    Backward counts from where the input of the second matrix is let go: its gradient, that of both halves, and
    their wide copies where the operator is not one kernel (NPU).
    """
    values = packs * ffn
    if setting.kernels == "npu":
        return setting.wide * values, 2 * setting.wide * values
    if setting.wide == 4:
        return 4 * values, 12 * values
    return 14 * values, 24 * values
