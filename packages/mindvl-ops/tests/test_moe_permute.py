# SPDX-License-Identifier: Apache-2.0
"""Permutation by experts: by hand, there and back, both forms alike, gradients."""

import pytest
import torch

from mindvl_ops import OpsError, moe_permute, moe_permute_map, moe_unpermute, moe_unpermute_map, use_backend
from mindvl_ops.moe_permute import (
    moe_permute_map_reference,
    moe_permute_reference,
    moe_unpermute_map_reference,
    moe_unpermute_reference,
)

EXPERTS = torch.tensor([[2, 0], [0, 1], [2, 1]])
TOKENS = torch.tensor([[10.0], [11.0], [12.0]])


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_tokens_lie_in_the_order_of_their_experts(backend):
    with use_backend(backend):
        permuted, slots = moe_permute(TOKENS, EXPERTS)
    assert permuted[:, 0].tolist() == [10, 11, 11, 12, 10, 12]  # experts 0, 0, 1, 1, 2, 2
    assert slots.tolist() == [4, 0, 1, 2, 5, 3]
    assert slots.dtype == torch.int32


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_map_counts_the_experts_of_a_token_upwards(backend):
    routing_map = torch.zeros(3, 3, dtype=torch.bool).scatter_(1, EXPERTS, True)
    weights = torch.arange(9.0).view(3, 3)
    with use_backend(backend):
        permuted, permuted_weights, slots = moe_permute_map(TOKENS, routing_map, 2, weights)
        back = moe_unpermute_map(permuted, slots, routing_map, weights)
        plain = moe_unpermute_map(permuted, slots, routing_map)
    assert permuted[:, 0].tolist() == [10, 11, 11, 12, 10, 12]
    assert permuted_weights.tolist() == [0, 3, 4, 7, 2, 8]
    assert slots.tolist() == [0, 4, 1, 2, 3, 5]
    assert back[:, 0].tolist() == [10 * (0 + 2), 11 * (3 + 4), 12 * (7 + 8)]
    assert plain[:, 0].tolist() == [20, 22, 24]


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_weights_that_add_up_to_one_give_the_token_back(backend):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(20, 7, generator=generator)
    experts = torch.rand(20, 6, generator=generator).argsort(dim=1)[:, :3]
    weights = torch.rand(20, 3, generator=generator)
    weights /= weights.sum(dim=1, keepdim=True)
    with use_backend(backend):
        permuted, slots = moe_permute(tokens, experts)
        torch.testing.assert_close(moe_unpermute(permuted, slots, weights), tokens)
        one, slots = moe_permute(tokens, experts[:, :1])
        torch.testing.assert_close(moe_unpermute(one, slots), tokens, rtol=0, atol=0)


def test_gradients_are_right_in_float64():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(3, 2, generator=generator).double().requires_grad_()
    permuted = torch.randn(6, 2, generator=generator).double().requires_grad_()
    weights = torch.randn(3, 2, generator=generator).double().requires_grad_()
    by_map = torch.randn(3, 3, generator=generator).double().requires_grad_()
    _, slots = moe_permute_reference(tokens, EXPERTS)
    routing_map = torch.zeros(3, 3, dtype=torch.bool).scatter_(1, EXPERTS, True)
    check = torch.autograd.gradcheck
    assert check(lambda x: moe_permute_reference(x, EXPERTS)[0], (tokens,))
    assert check(lambda x, w: moe_unpermute_reference(x, slots, w), (permuted, weights))
    assert check(lambda x, w: moe_permute_map_reference(x, routing_map, 2, w)[:2], (tokens, by_map))
    assert check(lambda x, w: moe_unpermute_map_reference(x, slots, routing_map, w), (permuted, by_map))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(OpsError, match="moe_permute"):
        moe_permute(TOKENS, EXPERTS[:2])
    with pytest.raises(OpsError, match="moe_unpermute"):
        moe_unpermute(torch.zeros(6, 2), torch.arange(6).int(), torch.zeros(2, 2))
    with pytest.raises(OpsError, match="moe_permute_map"):
        moe_permute_map(TOKENS, torch.zeros(3, 3), 1)
    with pytest.raises(OpsError, match=r"weights \[2, 3\] beside routing_map \[3, 3\]"):
        moe_permute_map(TOKENS, torch.ones(3, 3, dtype=torch.bool), 3, torch.zeros(2, 3))
    with pytest.raises(OpsError, match="moe_unpermute_map: permuted"):
        moe_unpermute_map(torch.zeros(4, 1), torch.arange(4).int(), torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(OpsError, match=r"weights \[2, 2\] beside routing_map \[2, 3\]"):
        moe_unpermute_map(
            torch.zeros(4, 1), torch.arange(4).int(), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 2)
        )


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("k", [0, 1, 3, 4, -1, 2.0])
def test_a_k_that_is_not_that_of_the_map_is_refused(backend, k):
    routing_map = torch.zeros(3, 3, dtype=torch.bool).scatter_(1, EXPERTS, True)
    with use_backend(backend), pytest.raises(OpsError, match=rf"moe_permute_map: k={k}"):
        moe_permute_map(TOKENS, routing_map, k)


def test_a_token_with_another_number_of_experts_is_named():
    routing_map = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    with pytest.raises(OpsError, match="k=2, but token 1 has 1 experts"):
        moe_permute_map(TOKENS, routing_map, 2)
