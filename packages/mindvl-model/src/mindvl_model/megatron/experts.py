# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts layer: route, dispatch tokens by all-to-all, grouped matmul, combine by routing weight.

Replaces the MLP of a transformer layer of megatron-core. Each expert-parallel rank holds an equal block of experts;
experts are not split over tensor-parallel ranks. A token is sent once for each of its experts, and no token is dropped.
"""

from copy import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import mindvl_ops as ops
from mindvl_model.megatron.expert_messages import ExpertMessages, count
from mindvl_model.megatron.router import Router
from mindvl_model.megatron.spec import PreNormLayer, SwiGLU


class GroupedLinear(torch.nn.Module):
    """The weights of one linear layer for all experts of this rank, [E/ep, in, out]."""

    def __init__(
        self, config: TransformerConfig, num_local: int, first: int, input_size: int, output_size: int
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_local, input_size, output_size, dtype=config.params_dtype))
        # Gradients are reduced over the expert-data-parallel group. Set for every parallel layout, so that optimizer
        # states always have the same form.
        self.weight.allreduce = False  # type: ignore[attr-defined]
        # Tensor-parallel ranks hold different experts or, with a sharded optimizer, different shards of the same
        # experts, so all ranks contribute to the gradient norm.
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.weight.first_expert = first  # type: ignore[attr-defined]
        self._forward_impl = ops.grouped_matmul  # named as in layers of megatron-core; quantized.py replaces it

    def forward(self, rows: Tensor, sizes: Tensor | list[int]) -> Tensor:
        """Rows [M, in], sorted by expert -> [M, out]; `sizes` is the number of rows of each expert, then of padding."""
        return self._forward_impl(rows, self.weight, sizes)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """Sharded state for megatron-core checkpoints: [E, in, out], sharded along the experts."""
        if not isinstance(self.weight, Tensor):  # quantized below adapters: not saved
            return {}
        rank = parallel_state.get_expert_model_parallel_rank()
        size = parallel_state.get_expert_model_parallel_world_size()
        axis = len(sharded_offsets)
        key = f"{prefix}weight"
        return {
            key: ShardedTensor.from_rank_offsets(
                key,
                self.weight,
                *sharded_offsets,
                (axis, rank, size),
                replica_id=(0, 0, parallel_state.get_expert_data_parallel_rank()),
                prepend_axis_num=axis,
            )
        }


class Experts(MegatronModule):
    """The gated MLPs of the experts of this rank."""

    def __init__(self, config: TransformerConfig, num_local: int, first: int) -> None:
        super().__init__(config=config)
        hidden_size, ffn_size = config.hidden_size, config.moe_ffn_hidden_size
        assert ffn_size is not None
        self.linear_fc1 = GroupedLinear(config, num_local, first, hidden_size, 2 * ffn_size)
        self.linear_fc2 = GroupedLinear(config, num_local, first, ffn_size, hidden_size)

    def forward(self, rows: Tensor, sizes: Tensor | list[int]) -> Tensor:
        """Rows [M, H], sorted by expert -> [M, H]."""
        output: Tensor = self.linear_fc2(ops.swiglu(self.linear_fc1(rows, sizes)), sizes)
        return output


class ExpertLayer(MegatronModule):
    """Routed experts and an optional shared expert, in place of an MLP."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        assert config.num_moe_experts is not None
        self.num_experts: int = config.num_moe_experts
        self.ep_size = config.expert_model_parallel_size
        self.messages: ExpertMessages | None = None  # set by the model if ep_size > 1
        num_local = self.num_experts // self.ep_size
        self.router = Router(config)
        rank = parallel_state.get_expert_model_parallel_rank() if self.ep_size > 1 else 0
        self.experts = Experts(config, num_local, rank * num_local)
        if config.moe_shared_expert_intermediate_size:
            self.shared_experts = _shared_expert(config)
        else:
            self.shared_experts = None

    def set_layer_number(self, layer_number: int) -> None:
        """Set the number of the layer, from 1; called by the transformer layer of megatron-core."""
        self.router.layer_number = layer_number

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[T/tp, 1, H] -> [T/tp, 1, H], and None for the bias."""
        output = self._routed(hidden_states.squeeze(1)).unsqueeze(1)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden_states)[0]
        return output, None

    def _routed(self, tokens: Tensor) -> Tensor:
        """Weighted sums [T/tp, H] over the routed experts of tokens [T/tp, H].

        Rows [M, H] have one name from the first exchange to the last, so that each result frees the one before it.
        """
        weights, experts = self.router(tokens)
        num_tokens, messages = len(tokens), self.messages
        if messages is None:
            rows, slots = ops.moe_permute(tokens, experts)  # sorted by expert
            return ops.moe_unpermute(self.experts(rows, count(experts, self.num_experts)), slots, weights)
        in_blocks = self.training and not messages.is_exact
        if in_blocks:
            tokens, weights, experts, counts = messages.padded(tokens, weights, experts)
        else:
            counts = count(experts, self.num_experts)
        rows, slots = ops.moe_permute(tokens, experts)  # sorted by rank, then by expert
        group = parallel_state.get_expert_model_parallel_group()
        arriving, sent, received = self._exchanged_sizes(counts, in_blocks=in_blocks)
        rows = all_to_all(group, rows, received, sent)
        expert = self._expert_of_rows(arriving, sum(received))
        rows, slots_here = ops.moe_permute(rows, expert)  # from (rank, expert) to (expert, rank)
        rows = self.experts(rows, arriving.sum(dim=0))
        rows = ops.moe_unpermute(rows, slots_here)
        rows = all_to_all(group, rows, sent, received)
        output = ops.moe_unpermute(rows, slots, weights)
        return output[:num_tokens] if in_blocks else output

    def _expert_of_rows(self, arriving: Tensor, num_rows: int) -> Tensor:
        """Local expert [M, 1] of the rows from all ranks, which are sorted by rank, then by expert."""
        local = torch.arange(arriving.shape[1], device=arriving.device).repeat(self.ep_size)
        return local.repeat_interleave(arriving.flatten(), output_size=num_rows)[:, None]

    def _exchanged_sizes(self, counts: Tensor, *, in_blocks: bool) -> tuple[Tensor, list[int], list[int]]:
        """Exchange the numbers of rows, [E] or with padding [ep, E/ep + 1], in one small message.

        The split sizes of an all-to-all are numbers on the host on every backend. Blocks have a fixed size; without them
        the sizes depend on the routing of this layer, and the host waits for them. A recomputed pass routes the same
        tokens to the same experts, so it takes the sizes of the first pass.

        Returns:
            Rows from each rank for each expert of this rank, and its padding [ep, E/ep (+ 1)]; rows sent to and received
            from each rank.
        """
        kept, number = self.router.pack.expert_rows, self.router.layer_number
        if torch.is_grad_enabled() and number in kept:
            known: tuple[Tensor, list[int], list[int]] = kept.pop(number)
            return known
        assert self.messages is not None
        arriving = torch.empty_like(counts)
        group = parallel_state.get_expert_model_parallel_group()
        torch.distributed.all_to_all_single(arriving, counts, group=group)
        if in_blocks:
            assert self.messages.blocks is not None
            rows = [self.messages.blocks.rows] * self.ep_size
            sizes = arriving, rows, rows
        else:
            by_rank = torch.stack((counts, arriving)).view(2, self.ep_size, -1)
            sent, received = by_rank.sum(dim=2).tolist()  # both with one wait
            if self.training:
                self.messages.note_exact(sent)
            sizes = by_rank[1], sent, received
        if self.router.is_first_of_two:
            kept[number] = sizes
        return sizes


def connect_experts(model: torch.nn.Module, messages: ExpertMessages) -> None:
    """Let all expert layers of a model or pipeline stage exchange rows by the same messages."""
    for module in model.modules():
        if isinstance(module, ExpertLayer):
            module.messages = messages


class ExpertTransformerLayer(PreNormLayer):
    """Transformer layer that passes the packed sequence to its router."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.mlp.router.pack = kwargs["packed_seq_params"]
        return super().forward(*args, **kwargs)


def _shared_expert(config: TransformerConfig) -> MLP:
    shared = copy(config)
    shared.ffn_hidden_size = config.moe_shared_expert_intermediate_size
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=SwiGLU)
    return MLP(
        shared,
        submodules,
        ffn_hidden_size=shared.ffn_hidden_size,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
