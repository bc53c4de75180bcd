# SPDX-License-Identifier: Apache-2.0
"""One seeded call of every operator, small or large: what `check_operators` compares and times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .angles import rotary_tables
from .attention import attention
from .backend import chosen
from .cross_entropy import IGNORE_INDEX, cross_entropy, linear_cross_entropy
from .grouped_matmul import grouped_matmul
from .masked_softmax import scaled_masked_softmax
from .moe_gating import moe_gating
from .moe_permute import moe_permute, moe_permute_map, moe_unpermute, moe_unpermute_map
from .norm import add_rms_norm, rms_norm
from .patch_embed import patch_embed
from .rope import rotary
from .segments import Segments
from .swiglu import swiglu

EXPERTS, CHOSEN = 16, 2


@dataclass(frozen=True)
class Case:
    """A call of one operator."""

    function: Callable[..., Tensor]  # tensors -> all results of the public function, as one tensor
    inputs: tuple[Tensor, ...]  # floating, on the CPU; gradients are wanted for all
    trains: bool = True  # whether there are gradients


def cases(dtype: torch.dtype, *, tokens: int = 64, seed: int = 0) -> dict[str, Case]:
    """Operator -> its case.

    Args:
        tokens: Size of the inputs, a multiple of 32.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    width = 4 * tokens
    long = tokens // 2
    segments = Segments([long, 1, 0, tokens - long - 1])
    labels = torch.randint(0, width, (tokens,), generator=generator)
    labels[::7] = IGNORE_INDEX
    return {
        "adamw": Case(_adamw_step, tuple(normal(width, tokens) for _ in range(2)), trains=False),
        "add_rms_norm": Case(
            lambda x, y, w: _one(add_rms_norm(x, y, w, 1e-6)),
            (normal(tokens, width), normal(tokens, width), normal(width)),
        ),
        "attention": Case(
            lambda q, k, v: attention(q, k, v, segments, causal=True),
            (normal(tokens, 4, 32), normal(tokens, 2, 32), normal(tokens, 2, 32)),
        ),
        "cross_entropy": Case(lambda x: cross_entropy(x, labels.to(x.device)), (normal(tokens, width),)),
        "linear_cross_entropy": Case(
            lambda h, w: linear_cross_entropy(h, w, labels.to(h.device)), (normal(tokens, 64), normal(width, 64))
        ),
        "patch_embed": Case(lambda x, w: patch_embed(x, w), (normal(tokens, 96), normal(64, 96))),
        "rms_norm": Case(lambda x, w: rms_norm(x, w, 1e-6), (normal(tokens, width), normal(width))),
        "rotary": Case(_turned, (normal(tokens, 4, 32),)),
        "scaled_masked_softmax": Case(_masked, (normal(1, 2, tokens, tokens),)),
        "swiglu": Case(swiglu, (normal(tokens, 2 * width),)),
        **_moe_cases(normal, generator, tokens, width),
    }


def _moe_cases(normal: Callable[..., Tensor], generator: torch.Generator, tokens: int, width: int) -> dict[str, Case]:
    experts = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :CHOSEN]
    routing_map = torch.zeros(tokens, EXPERTS, dtype=torch.bool).scatter_(1, experts, True)
    slots = experts.flatten().argsort(stable=True).argsort().int()
    sizes = torch.bincount(experts.flatten(), minlength=EXPERTS)
    by_map = routing_map.T.nonzero()[:, 1].argsort(stable=True).int()

    def gate(logits: Tensor, bias: Tensor) -> Tensor:
        weights, numbers = moe_gating(
            logits, CHOSEN, score="sigmoid", bias=bias.detach(), num_groups=4, top_groups=2, scaling=2.5
        )
        return weights + 0 * numbers.sum()  # the order of the weights shows the choice

    def permute(x: Tensor) -> Tensor:
        return moe_permute(x, experts.to(x.device))[0]

    def permute_map(x: Tensor, weights: Tensor) -> Tensor:
        permuted, permuted_weights, _ = moe_permute_map(x, routing_map.to(x.device), CHOSEN, weights)
        assert permuted_weights is not None
        return _one((permuted, permuted_weights))

    return {
        "grouped_matmul": Case(
            lambda x, w: grouped_matmul(x, w, sizes.to(x.device)),
            (normal(tokens * CHOSEN, 32), normal(EXPERTS, 32, 48)),
        ),
        "moe_gating": Case(gate, (normal(tokens, EXPERTS), normal(EXPERTS))),
        "moe_permute": Case(permute, (normal(tokens, width),)),
        "moe_permute_map": Case(permute_map, (normal(tokens, width), normal(tokens, EXPERTS))),
        "moe_unpermute": Case(
            lambda x, w: moe_unpermute(x, slots.to(x.device), w),
            (normal(tokens * CHOSEN, width), normal(tokens, CHOSEN)),
        ),
        "moe_unpermute_map": Case(
            lambda x, w: moe_unpermute_map(x, by_map.to(x.device), routing_map.to(x.device), w),
            (normal(tokens * CHOSEN, width), normal(tokens, EXPERTS)),
        ),
    }


def _one(results: Sequence[Tensor]) -> Tensor:
    return torch.cat([result.flatten() for result in results])


def _turned(x: Tensor) -> Tensor:
    cos, sin = rotary_tables(torch.arange(len(x), device=x.device), x.shape[-1], 10000.0)
    return rotary(x, cos, sin)


def _masked(x: Tensor) -> Tensor:
    blocked = torch.ones(1, 1, *x.shape[2:], dtype=torch.bool, device=x.device).triu(1)
    return scaled_masked_softmax(x, blocked, 0.5)


@torch.no_grad()
def _adamw_step(param: Tensor, grad: Tensor) -> Tensor:
    param, first, second = param.clone(), grad * 0.1, grad.square() * 0.1
    chosen("adamw")(
        [param], [grad], [first], [second],
        step=3, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, decoupled=True, bias_correction=True,
    )  # fmt: skip
    return _one((param, first, second))
