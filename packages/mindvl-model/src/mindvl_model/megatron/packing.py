# SPDX-License-Identifier: Apache-2.0
"""The properties of a packed sequence that layers need, built once per forward and passed through megatron-core blocks.

The fields of megatron-core's PackedSeqParams stay unset, because PackedAttention reads the fields defined here.
"""

from dataclasses import dataclass, field
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mindvl_ops import Segments

IGNORE_INDEX = -100  # label of a token without loss


@dataclass
class PackedSequence(PackedSeqParams):
    """Segments and rotary angles of a packed sequence. With context parallelism each rank has a slice [T/cp] of it.

    qkv_format is "sbhd" although sequences are packed: the "thd" path of megatron-core copies lengths to the host in
    every layer.
    """

    segments: Segments | None = None  # tokens attend inside their segment, in all layers not listed below
    segments_by_layer: dict[int, Segments] = field(default_factory=dict)  # layer number, from 1
    cos: Tensor | None = None  # [T/cp, D]
    sin: Tensor | None = None  # [T/cp, D]
    input_ids: Tensor | None = None  # [T], the whole pack, for multi-token prediction
    labels: Tensor | None = None  # [T], the whole pack, for multi-token prediction
    is_token: Tensor | None = None  # [T/cp] bool, False for padding, which routers do not count; None: no padding
    loss_positions: Tensor | None = None  # [L] on the host, positions of the labels in the whole pack; None: unknown
    num_loss_tokens: Tensor | None = None  # number of loss tokens, scalar on the device; None: no labels
    num_tokens: int | None = None  # length before padding by the model; None: not padded
    # By layer number: sizes of a forward pass to be recomputed.
    expert_rows: dict[int, Any] = field(default_factory=dict)
    dropout_rows: Tensor | None = None  # [T/cp] int64, keys of the rows for the dropout of adapters; None: no dropout
    # By layer number: tensors [T/(cp*tp), 1, H] that are added to the output of the layer (deepstack.py).
    added_after: dict[int, Tensor] = field(default_factory=dict)
    cp_rank: int = 0
    cp_size: int = 1
    qkv_format: str = "sbhd"

    def of_layer(self, layer_number: int) -> Segments:
        """Segments of a layer; layer_number counts from 1."""
        segments = self.segments_by_layer.get(layer_number, self.segments)
        assert segments is not None
        return segments

    def own_slice(self, whole: Tensor) -> Tensor:
        """Slice of this context-parallel rank along the last axis, [..., T] -> [..., T/cp]."""
        length = whole.shape[-1] // self.cp_size
        return whole.narrow(-1, self.cp_rank * length, length)
