# SPDX-License-Identifier: Apache-2.0
"""What every layer must know of a packed pack, made once per step and handed through megatron-core's blocks.

Comes after the batch, before the layers; megatron's own fields stay unset, because our attention reads ours.
"""

from dataclasses import dataclass, field

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mindvl_ops import Segments


@dataclass
class PackedSequence(PackedSeqParams):
    """Segments and rotary angles of one packed pack. With context parallel each rank holds a slice [T/cp] of it.

    qkv_format is "sbhd" although packs are packed: megatron's "thd" path copies lengths to the host in every layer.
    """

    segments: Segments | None = None  # who attends to whom, unless a layer is listed below
    segments_by_layer: dict[int, Segments] = field(default_factory=dict)  # layer number, from 1
    cos: Tensor | None = None  # [T/cp, D]
    sin: Tensor | None = None  # [T/cp, D]
    input_ids: Tensor | None = None  # [T], whole, for multi-token prediction
    labels: Tensor | None = None  # [T], whole, for multi-token prediction
    is_token: Tensor | None = None  # [T/cp] bool, False for padding, which routers do not count; None: all are
    num_loss_tokens: Tensor | None = None  # loss tokens, scalar on the device; None: nothing is learned
    num_tokens: int | None = None  # of the pack as it was handed over; behind them padding of our own; None: all
    cp_rank: int = 0
    cp_size: int = 1
    qkv_format: str = "sbhd"

    def of_layer(self, layer_number: int) -> Segments:
        """Segments of one layer (number from 1)."""
        segments = self.segments_by_layer.get(layer_number, self.segments)
        assert segments is not None
        return segments

    def own_slice(self, whole: Tensor) -> Tensor:
        """What context-parallel rank cp_rank holds of something whose last axis is the pack, [..., T] -> [..., T/cp]."""
        length = whole.shape[-1] // self.cp_size
        return whole.narrow(-1, self.cp_rank * length, length)
