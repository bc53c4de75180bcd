# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of the linear layers of megatron-core, in every parallel layout.

Comes after the model is built and its weights are loaded; adapters.py of this package attaches these layers. Each
published layer has its own A [rank, in] and B [out, rank], also where the model joins several into one weight. A layer
split by rows of its weight has A replicated and B split; one split by columns has A split and B replicated. The gather or
reduction is that of the layer, but applied to the `rank` features between both matrices. With DoRA (arXiv 2402.09353)
each published layer also has the norms M [out] of the rows of its weight, split or replicated like B.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

import mindvl_ops as ops
from mindvl_model.adapters.dropout import keep_mask, layer_key
from mindvl_model.adapters.lora_config import LoRAConfig
from mindvl_model.adapters.targets import Target
from mindvl_model.megatron.experts import GroupedLinear
from mindvl_model.megatron.mla import DuplicatedLinear

# A, B, M and the rows without an adapter, in the order of the rows of the weight.
_Joined = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class DropoutRows:
    """Keys [S] of the rows that the layers of one part see now; set before each of their forward passes."""

    keys: Tensor | None = None


class Factors(torch.nn.Module):
    """Both matrices of one published layer: A [rank, in], B [out, rank]; of all experts [E, in, rank], [E, rank, out].

    With DoRA also M [out], the trained norms of the rows of the weight. They are taken by a call, because forward pre-hooks
    of megatron-core wait for the parameters of the called module.
    """

    def __init__(self, a: Tensor, b: Tensor, m: Tensor | None = None) -> None:
        super().__init__()
        self.A, self.B = torch.nn.Parameter(a), torch.nn.Parameter(b)
        self.M = None if m is None else torch.nn.Parameter(m)

    def forward(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return A, B and M."""
        return self.A, self.B, self.M


class LowRank(torch.nn.Module):
    """The adapters of one linear layer. Children are named by the last component of the published layer's name."""

    def __init__(self, target: Target, lora: LoRAConfig, linear: Any) -> None:
        super().__init__()
        self.target, self.scaling, self.rate, self.rank = target, lora.scaling, lora.dropout, lora.rank
        self.dora = lora.dora
        self.layer_key = layer_key(target.layer)
        self.dropout_rows: DropoutRows | None = None  # set if there is dropout
        self.group = getattr(linear, "tp_group", None)
        self.size = 1 if self.group is None else self.group.size()
        self.tp_rank = 0 if self.group is None else self.group.rank()
        weight, self.sequence_parallel = linear.weight, bool(getattr(linear, "sequence_parallel", False))
        self.is_row = isinstance(linear, RowParallelLinear)
        self.axes: dict[str, int] = {}  # tensor-parallel axis of each split parameter
        self.out_size = linear.output_size if isinstance(linear, ColumnParallelLinear) else weight.shape[0]
        outputs = self._published_outputs(linear)
        # Query groups may be fewer than tensor-parallel ranks. A rank then has rows of a part of a group: B is replicated.
        self.is_cut = (not self.is_row and any(rows % self.size for rows in outputs)) or self._cuts_groups(outputs)
        self.local_outputs = outputs if self.is_row or self.is_cut else [rows // self.size for rows in outputs]
        for index in target.chosen:
            if target.experts:
                a = weight.new_empty(weight.shape[0], weight.shape[1], lora.rank)
                b = weight.new_zeros(weight.shape[0], lora.rank, weight.shape[2] // target.per_expert)
            else:
                a = weight.new_empty(lora.rank, weight.shape[1])
                b = weight.new_zeros(self.local_outputs[index], lora.rank)
            self.add_module(target.key(index), Factors(a, b, b.new_empty(len(b)) if lora.dora else None))
        self._mark(linear)

    def _published_outputs(self, linear: Any) -> list[int]:
        """Output sizes of the published layers of the whole weight; one if the weight is one published layer."""
        if self.target.experts:
            return []
        if len(self.target.published) == 1:
            return [self.out_size]
        return [len(part) for part in self.target.rule.split(torch.empty(self.out_size, 1, device="meta"))]

    def _cuts_groups(self, outputs: list[int]) -> bool:
        """Whether a rank's rows of the weight do not consist of equal parts of all published layers."""
        if self.is_row or self.size == 1 or len(outputs) < 2 or self.target.layer.endswith("linear_fc1"):
            return False
        # One row of each key-value head: a marker in an empty query group tells how many groups there are.
        width = self.out_size // self.size
        whole = self._joined([torch.full((rows, 1), float(index)) for index, rows in enumerate(outputs)])
        counts = {tuple((chunk == index).sum().item() for index in range(len(outputs))) for chunk in whole.split(width)}
        return len(counts) > 1

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else self.target.rule.join(parts)

    def _mark(self, linear: Any) -> None:
        """Set the attributes that megatron-core reads: how gradients are reduced and counted in their norm."""
        reference = linear.weight
        for key, factors in self.named_children():
            for name, parameter in factors.named_parameters():
                if self.target.experts:
                    for attribute in ("allreduce", "tensor_model_parallel", "first_expert"):
                        setattr(parameter, attribute, getattr(reference, attribute))
                elif self.is_row == (name == "A") and not self.is_cut and self.group is not None:
                    axis = 1 if self.is_row else 0
                    self.axes[f"{key}.{name}"] = axis
                    set_tensor_model_parallel_attributes(parameter, True, axis, 1)
                else:  # replicated; with sequence parallelism each rank has a part of the gradient
                    partial = getattr(reference, "sequence_parallel", False) or self.sequence_parallel
                    # Rows of a cut B are used by one rank each, in any case.
                    parameter.sequence_parallel = partial or (self.is_cut and name == "B")  # type: ignore[attr-defined]

    def columns(self, linear: Any, inputs: Tensor, output: Tensor) -> Tensor:
        """Add to the output [T, 1, out/tp] of a weight split by rows, from [S, 1, in] of this rank."""
        a, b, m, missing = self._joined_factors()
        hidden = F.linear(self._dropped(inputs), a)  # [S, 1, count * rank]
        if self.size > 1 and self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.group)
        elif self.size > 1:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.group)
        return self._added(linear, output, hidden, (a, b, m, missing))

    def rows(self, linear: Any, inputs: Tensor, output: Tensor) -> Tensor:
        """Add to the output [S, 1, out] of this rank of a weight split by columns, from [T, 1, in/tp]."""
        a, b, m, missing = self._joined_factors()
        hidden = F.linear(self._dropped(inputs), a)
        if self.size > 1 and self.sequence_parallel:
            hidden = reduce_scatter_to_sequence_parallel_region(hidden, group=self.group)
        elif self.size > 1:
            hidden = reduce_from_tensor_model_parallel_region(hidden, group=self.group)
        return self._added(linear, output, hidden, (a, b, m, missing))

    def duplicated(self, linear: Any, inputs: Tensor, output: Tensor) -> Tensor:
        """Add to the output [S, 1, out] of a replicated weight, from [S, 1, in]."""
        factors = self._joined_factors()
        return self._added(linear, output, F.linear(self._dropped(inputs), factors[0]), factors)

    def experts(self, rows: Tensor, sizes: Tensor | list[int]) -> Tensor:
        """Rows [M, in], sorted by expert -> [M, out]."""
        outputs: dict[int, Tensor] = {}
        for index, (a, b, _) in self._factors().items():
            outputs[index] = ops.grouped_matmul(ops.grouped_matmul(rows, a, sizes), b, sizes)
        zeros = torch.zeros_like(next(iter(outputs.values())))  # the half of a gated matrix without adapters
        return self.scaling * torch.cat([outputs.get(index, zeros) for index in range(self.target.per_expert)], dim=-1)

    @torch.no_grad()
    def reset_norms(self, linear: Any) -> None:
        """Set the norms of DoRA to those of the adapted rows, as PEFT does before training."""
        norms = self._norms(linear, *self._joined_factors()[:2])
        if self.is_cut:  # every rank has the norms of all rows
            whole = norms.new_zeros(self.out_size)
            self._own_rows(whole).copy_(norms)
            torch.distributed.all_reduce(whole, group=self.group)
            norms = whole
        places = torch.arange(len(norms), dtype=torch.float64)[:, None].split(self.local_outputs)
        by_layer = torch.empty_like(norms)
        by_layer[self._joined(list(places)).flatten().long()] = norms
        for index, own in enumerate(by_layer.split(self.local_outputs)):
            if index in self.target.chosen:
                self.get_submodule(self.target.key(index)).M.copy_(own)  # type: ignore[operator]

    def _added(self, linear: Any, output: Tensor, hidden: Tensor, factors: _Joined) -> Tensor:
        """Add the adapters to an output of the layer; with DoRA, also multiply the sum by the trained norm of each row."""
        a, b, m, missing = factors
        change = self.scaling * F.linear(hidden, b)
        if m is None:
            return output + change
        factor = m / self._norms(linear, a, b)
        factor = factor if missing is None else factor + missing
        bias = None if getattr(linear, "skip_bias_add", False) else getattr(linear, "bias", None)
        if bias is None:
            return factor * (output + change)
        return factor * (output - bias + change) + bias

    @torch.no_grad()
    def _norms(self, linear: Any, a: Tensor, b: Tensor) -> Tensor:
        """Norms [out/tp] of the rows of W + scaling * B A, without a gradient (section 4.3 of the paper).

        Expanded, so that B A, as large as W, is not computed: |w|^2 + 2 s b.(A w) + s^2 b.(A A^T b). Rounded to the type of
        the weight as in PEFT, so that their quotient with new norms is 1.
        """
        weight = linear.weight if isinstance(linear.weight, Tensor) else linear.weight.dequantized()
        wide_a, wide_b = a.float(), b.float()
        cross = F.linear(weight, a).float() + 0.5 * self.scaling * (wide_b @ (wide_a @ wide_a.T))
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32) ** 2
        squares += 2 * self.scaling * (cross * wide_b).sum(dim=1)
        if self.is_row and self.size > 1:
            torch.distributed.all_reduce(squares, group=self.group)
        return squares.clamp_min(0).sqrt().to(weight.dtype)

    def _factors(self) -> dict[int, tuple[Tensor, Tensor, Tensor | None]]:
        """A, B and M by index of the published layer."""
        return {index: self.get_submodule(self.target.key(index))() for index in self.target.chosen}

    def _joined_factors(self) -> _Joined:
        """A [count * rank, in] of all adapters, and B [out, count * rank] in the order of the rows of the weight.

        In B each adapter has its own columns; the others are zero in its rows. With DoRA also M [out], zero in rows without an
        adapter, and a tensor [out] that is one in these rows; None if there are none.
        """
        factors = self._factors()
        a = torch.cat([one for one, _, _ in factors.values()])
        if len(self.local_outputs) == 1:
            return a, *factors[0][1:], None
        parts, norms, missing = [], [], []
        for index, rows in enumerate(self.local_outputs):
            missing.append(a.new_full((rows, 1), float(index not in factors)))
            if index not in factors:
                parts.append(a.new_zeros(rows, len(a)))
                norms.append(a.new_zeros(rows, 1))
                continue
            _, b, m = factors[index]
            before = list(factors).index(index) * self.rank
            parts.append(F.pad(b, (before, len(a) - self.rank - before)))
            norms += [] if m is None else [m[:, None]]
        joined = self._own_rows(self._joined(parts))
        if not self.dora:
            return a, joined, None, None
        m = self._own_rows(self._joined(norms)).squeeze(1)
        if len(factors) == len(self.local_outputs):
            return a, joined, m, None
        return a, joined, m, self._own_rows(self._joined(missing)).squeeze(1)

    def _own_rows(self, whole: Tensor) -> Tensor:
        """The rows of this rank, if it has all rows of B."""
        if not self.is_cut:
            return whole
        width = self.out_size // self.size
        return whole.narrow(0, self.tp_rank * width, width)

    def _dropped(self, inputs: Tensor) -> Tensor:
        """The inputs with some elements set to zero and the others scaled, in training."""
        if self.dropout_rows is None or self.dropout_rows.keys is None or not self.training:
            return inputs
        keys, width = self.dropout_rows.keys, inputs.shape[-1]
        count = inputs.numel() // width
        if count != len(keys):  # a slice of the sequence
            keys = keys.narrow(0, parallel_state.get_tensor_model_parallel_rank() * count, count)
        first = self.tp_rank * width if self.is_row else 0
        mask = keep_mask(keys, self.layer_key, first, width, self.rate).view(inputs.shape)
        return inputs * mask * (1 / (1 - self.rate))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Sharded state for megatron-core checkpoints: of whole matrices, as PEFT has them, or [E, ...] for experts."""
        held = self.state_dict(prefix="", keep_vars=True)
        if not self.target.experts:
            sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
                held,
                prefix,
                self.axes,
                sharded_offsets,
                tp_group=self.group or parallel_state.get_tensor_model_parallel_group(),
                dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            )
            return sharded
        axis = len(sharded_offsets)
        own = (
            axis,
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}", tensor, *sharded_offsets, own, replica_id=replica, prepend_axis_num=axis
            )
            for name, tensor in held.items()
        }


class _Adapted:
    """Adds the state of the adapters to that of the layer."""

    lora: LowRank

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Sharded state of the layer and its adapters."""
        layer: Any = super()
        state: dict[str, Any] = layer.sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {name: entry for name, entry in state.items() if not name.startswith(f"{prefix}lora.")}
        return own | self.lora.sharded_state_dict(f"{prefix}lora.", sharded_offsets, metadata)


class AdaptedColumnLinear(_Adapted, ColumnParallelLinear):
    """ColumnParallelLinear with adapters."""

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = ColumnParallelLinear.forward(self, input_, *args, **kwargs)
        return self.lora.columns(self, input_, output), bias


class AdaptedRowLinear(_Adapted, RowParallelLinear):
    """RowParallelLinear with adapters."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = RowParallelLinear.forward(self, input_)
        return self.lora.rows(self, input_, output), bias


class AdaptedDuplicatedLinear(DuplicatedLinear):
    """DuplicatedLinear with adapters; its state is replicated like that of the layer."""

    lora: LowRank

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.lora.duplicated(self, hidden_states, super().forward(hidden_states))


class AdaptedGroupedLinear(_Adapted, GroupedLinear):
    """GroupedLinear with adapters for every expert."""

    def forward(self, rows: Tensor, sizes: Tensor | list[int]) -> Tensor:
        return GroupedLinear.forward(self, rows, sizes) + self.lora.experts(rows, sizes)


ADAPTED: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    ColumnParallelLinear: AdaptedColumnLinear,
    RowParallelLinear: AdaptedRowLinear,
    DuplicatedLinear: AdaptedDuplicatedLinear,
    GroupedLinear: AdaptedGroupedLinear,
}
