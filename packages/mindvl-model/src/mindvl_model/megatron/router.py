# SPDX-License-Identifier: Apache-2.0
"""The router of a mixture-of-experts layer: expert selection, load statistics and load balancing.

Used by experts.py. Two kinds: softmax with an auxiliary loss (Qwen3-MoE), and sigmoid with a bias that affects selection
only (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; arXiv 2408.15664). No token is dropped.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, router_gating_linear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import mindvl_ops as ops
from mindvl_model.megatron.packing import PackedSequence

EPSILON = 1e-20


@dataclass(frozen=True, kw_only=True)
class RouterStatistics:
    """Routing of one layer during one step, over all ranks, without padding. Tensors are on the device."""

    layer: int  # from 0; multi-token prediction layers follow the decoder layers
    tokens_per_expert: Tensor  # [E] float32, sums to tokens times experts per token
    entropy: Tensor  # of the routing probabilities, in nats, mean over tokens; log(E) for uniform routing
    max_violation: Tensor  # largest load over mean load, minus 1; 0 is perfect balance
    aux_loss: Tensor | None  # unweighted load-balancing loss, mean over tokens; None without this loss
    bias: Tensor | None  # [E] float32 after the update; None for routers without a bias


class Router(MegatronModule):
    """Selects the experts of each token by its scores [T, E], and computes their weights."""

    pack: PackedSequence  # set by the layer before every forward
    expert_bias: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        assert config.num_moe_experts is not None
        self.num_experts: int = config.num_moe_experts
        self.layer_number = 0  # from 1, set by the layer
        self.is_recomputed = config.recompute_granularity == "full"
        self.pack_is_split = config.sequence_parallel or config.context_parallel_size > 1
        self.weight = torch.nn.Parameter(
            torch.empty(self.num_experts, config.hidden_size, dtype=config.params_dtype),
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.has_bias = config.moe_router_score_function == "sigmoid"
        if self.has_bias:
            self.register_buffer("expert_bias", torch.zeros(self.num_experts))
        self._tally: Tensor | None = None  # [E + 3], of this step: tokens per expert, tokens, entropy, auxiliary loss
        self.statistics: RouterStatistics | None = None  # of the last finished step
        self.recorder: Callable[[int, Tensor], None] | None = None

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [T, K] float32 and experts [T, K] of tokens [T, H]."""
        config = self.config
        # Always in float32: rounding creates equal scores, which would be resolved by the index of the expert.
        logits = router_gating_linear(tokens, self.weight, None, torch.float32)
        sigmoid = config.moe_router_score_function == "sigmoid"
        weights, experts = ops.moe_gating(
            logits,
            config.moe_router_topk,
            score=config.moe_router_score_function,
            bias=self.expert_bias if self.has_bias else None,
            num_groups=config.moe_router_num_groups or 1,
            top_groups=config.moe_router_group_topk or 1,
            renormalize=sigmoid or not config.moe_router_pre_softmax,
            scaling=config.moe_router_topk_scaling_factor or 1.0,
        )
        if self.recorder is not None and not self.is_first_of_two:
            self.recorder(self.layer_number - 1, self._of_whole_pack(experts.detach()))
        if self.training and torch.is_grad_enabled():
            weights = self._balance(logits, weights, experts)
        return weights, experts

    @property
    def is_first_of_two(self) -> bool:
        """Whether this pass will be recomputed: a layer then runs first without, then with gradients."""
        return self.is_recomputed and self.training and not torch.is_grad_enabled()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Move and convert, but keep the bias in float32: updates of 0.001 would be lost in 16 bits."""
        bias = self.expert_bias if self.has_bias else None
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def _balance(self, logits: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Update the statistics and attach the gradient of the auxiliary load-balancing loss to the weights.

        The loss is that of transformers: E * sum over experts of (share of assignments) * (mean probability), which is
        K for perfect balance; here per pack and layer, averaged over layers. It is multiplied by the number of loss
        tokens of the pack, because all losses are summed over loss tokens and divided once by their global number.
        """
        config, pack = self.config, self.pack
        real = self._real_tokens(logits)  # [T/(cp*tp)] float32
        detached = logits.detach()
        if config.moe_router_score_function == "sigmoid":
            scores = detached.sigmoid()
            probabilities = scores / (scores.sum(dim=-1, keepdim=True) + EPSILON)
        else:
            probabilities = detached.softmax(dim=-1)
        load = torch.zeros(self.num_experts, device=logits.device)
        load.scatter_add_(0, experts.flatten().long(), real.repeat_interleave(experts.shape[1]))
        # xlogy has a kernel on every device; torch.special.entr falls back to the CPU on an NPU.
        entropy = -(torch.xlogy(probabilities, probabilities).sum(dim=-1) * real).sum()
        counts = torch.cat((load, real.sum()[None]))
        aux_loss = counts.new_zeros(())
        if config.moe_aux_loss_coeff and pack.num_loss_tokens is not None:
            whole = counts.clone()
            if self.pack_is_split:
                torch.distributed.all_reduce(whole, group=parallel_state.get_tensor_and_context_parallel_group())
            num_tokens = whole[-1].clamp(min=1)
            mean = (logits.softmax(dim=-1) * real[:, None]).sum(dim=0) / num_tokens  # partial sum of this rank
            loss = self.num_experts * (whole[:-1] / num_tokens * mean).sum()
            factor = config.moe_aux_loss_coeff / config.num_layers * pack.num_loss_tokens
            if MoEAuxLossAutoScaler.main_loss_backward_scale is None:
                # Otherwise a backward pass without a schedule would create it with a shape that schedules cannot copy to.
                MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=logits.device))
            weights = MoEAuxLossAutoScaler.apply(weights, loss * factor)
            aux_loss = loss.detach() * num_tokens
        tally = torch.cat((counts, entropy[None], aux_loss[None]))
        self._tally = tally if self._tally is None else self._tally + tally
        return weights

    def _of_whole_pack(self, values: Tensor) -> Tensor:
        """Gather slices [T/(cp*tp), ...] of all ranks to the pack [T, ...], without the padding added by the model."""
        if self.pack_is_split:
            group = parallel_state.get_tensor_and_context_parallel_group()
            values = gather_from_sequence_parallel_region(values, group=group)  # in the order of the slices
        return values[: self.pack.num_tokens]

    def _real_tokens(self, logits: Tensor) -> Tensor:
        """1 for tokens, 0 for padding, [T/(cp*tp)] float32."""
        if self.pack.is_token is None:
            return torch.ones(len(logits), device=logits.device)
        real = self.pack.is_token.float()
        return scatter_to_sequence_parallel_region(real) if self.config.sequence_parallel else real

    def take_tally(self) -> Tensor:
        """Return and clear the counts [E + 3] of this rank since the last call; zeros if there were none."""
        tally, self._tally = self._tally, None
        return tally if tally is not None else torch.zeros(self.num_experts + 3, device=self.weight.device)

    def finish_step(self, tally: Tensor, *, move_bias: bool) -> None:
        """Update the bias by the sign rule and store the statistics; `tally` is summed over all ranks."""
        load, (num_tokens, entropy, aux_loss) = tally[: self.num_experts], tally[self.num_experts :]
        num_tokens = num_tokens.clamp(min=1)
        if move_bias and self.has_bias and self.weight.requires_grad:
            self.expert_bias = ops.updated_expert_bias(self.expert_bias, load, self.config.moe_router_bias_update_rate)
        self.statistics = RouterStatistics(
            layer=self.layer_number - 1,
            tokens_per_expert=load,
            entropy=entropy / num_tokens,
            max_violation=load.max() / load.mean().clamp(min=EPSILON) - 1,
            aux_loss=aux_loss / num_tokens if self.config.moe_aux_loss_coeff else None,
            bias=self.expert_bias.clone() if self.has_bias else None,
        )


def routers(model: torch.nn.Module) -> list[Router]:
    """The routers of a model or pipeline stage, in layer order."""
    return [module for module in model.modules() if isinstance(module, Router)]


@torch.no_grad()
def finish_router_step(model: torch.nn.Module, *, move_bias: bool = True) -> None:
    """Sum the counts of a step over all ranks with different tokens in one all-reduce; update biases and statistics."""
    found = routers(model)
    if not found:
        return
    tallies = torch.stack([router.take_tally() for router in found])  # [L, E + 3]
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(tallies, group=group)
    for router, tally in zip(found, tallies, strict=True):
        router.finish_step(tally, move_bias=move_bias)


@contextmanager
def record_routing(model: torch.nn.Module) -> Iterator[dict[int, list[Tensor]]]:
    """Record the selected experts of every token in the body.

    Yields:
        By layer (from 0), one int32 tensor [T, K] for each pack, in the order of execution.
    """
    found, selected = routers(model), dict[int, list[Tensor]]()

    def record(layer: int, experts: Tensor) -> None:
        selected.setdefault(layer, []).append(experts)

    for router in found:
        router.recorder = record
    try:
        yield selected
    finally:
        for router in found:
            router.recorder = None


def router_statistics(model: torch.nn.Module) -> list[RouterStatistics]:
    """Statistics of the last finished step for each layer with experts on this pipeline stage."""
    kept: list[Any] = [router.statistics for router in routers(model)]
    return [statistics for statistics in kept if statistics is not None]
