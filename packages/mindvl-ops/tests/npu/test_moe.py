# SPDX-License-Identifier: Apache-2.0
"""Gating, permutation and grouped matmul on the simulated NPU: equal to the reference, gradients included."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindvl_ops import (
    OpsError,
    grouped_matmul,
    moe_gating,
    moe_permute,
    moe_permute_map,
    moe_unpermute,
    moe_unpermute_map,
    use_backend,
)
from mindvl_ops.testing import assert_parity

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
on_simulator = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@on_simulator
@given(
    grouping=st.sampled_from([(1, 1), (4, 2), (2, 1), (4, 4)]),
    k=st.integers(1, 4),
    score=st.sampled_from(["softmax", "sigmoid"]),
    dtype=dtypes,
    seed=st.integers(0, 100),
)
def test_gating_equals_reference(fake_npu, grouping, k, score, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(6, 16, generator=generator).argsort(dim=1)  # far enough apart that rounding chooses no other
    logits, bias = (places / 4 - 2).to(dtype), (torch.randn(16, generator=generator) / 100).to(dtype)

    def weights_and_experts(logits, bias):
        weights, experts = moe_gating(
            logits, k, score=score, bias=bias.detach(), num_groups=grouping[0], top_groups=grouping[1], scaling=2.5
        )
        return torch.cat((weights.double(), experts.double()), dim=1)

    assert_parity(weights_and_experts, (logits, bias), backend="npu")


@on_simulator
@given(tokens=st.integers(1, 20), k=st.integers(1, 4), width=st.integers(1, 9), dtype=dtypes, seed=st.integers(0, 100))
def test_permutation_there_and_back_equals_reference(fake_npu, tokens, k, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(tokens, 6, generator=generator).argsort(dim=1)[:, :k]
    routing_map = torch.zeros(tokens, 6, dtype=torch.bool).scatter_(1, experts, True)
    x, factor, weights, by_map = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((tokens, width), (tokens * k, 1), (tokens, k), (tokens, 6))
    )

    def by_index(x, factor, weights):
        permuted, slots = moe_permute(x, experts)
        return moe_unpermute(permuted * factor, slots, weights)

    def by_routing_map(x, factor, weights):
        permuted, inside, slots = moe_permute_map(x, routing_map, k, weights)
        return moe_unpermute_map(permuted * factor * inside[:, None], slots, routing_map)

    def weighed_after(x, factor, weights):
        permuted, _, slots = moe_permute_map(x, routing_map, k)
        return moe_unpermute_map(permuted * factor, slots, routing_map, weights)

    for function, inputs in ((by_index, weights), (by_routing_map, by_map), (weighed_after, by_map)):
        assert_parity(function, (x, factor, inputs), backend="npu")


@on_simulator
@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any), dtype=dtypes, on_host=st.booleans())
def test_grouped_matmul_equals_reference_with_both_gradients(fake_npu, sizes, dtype, on_host):
    x, weight = torch.randn(sum(sizes), 4).to(dtype), torch.randn(len(sizes), 4, 6).to(dtype)
    groups = sizes if on_host else torch.tensor(sizes)
    assert_parity(lambda x, w: grouped_matmul(x, w, groups), (x, weight), backend="npu")


def test_sizes_on_the_device_are_not_read_by_the_host(fake_npu):
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(2, 4, 6, requires_grad=True)
    with use_backend("npu"):
        grouped_matmul(x, weight, torch.tensor([2, 3])).sum().backward()
        permuted, slots = moe_permute(x.detach(), torch.tensor([[1, 0]] * 5))
        moe_unpermute(permuted, slots, torch.ones(5, 2))
    assert fake_npu.syncs == []


def test_a_frozen_weight_keeps_no_rows_and_costs_no_third_product(fake_npu):
    x, weight, kept = torch.randn(5, 4, requires_grad=True), torch.randn(2, 4, 6), []
    with use_backend("npu"), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        grouped_matmul(x, weight, [2, 3]).sum().backward()
    assert [list(tensor.shape) for tensor in kept if tensor.dim() > 1] == [[2, 4, 6]]
    assert len([call for call in fake_npu.calls if call.op.startswith("npu_grouped_matmul")]) == 2


def test_the_three_products_are_three_calls(fake_npu):
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(2, 4, 6, requires_grad=True)
    with use_backend("npu"):
        grouped_matmul(x, weight, [2, 3]).sum().backward()
    calls = [call.arguments for call in fake_npu.calls if call.op.startswith("npu_grouped_matmul")]
    assert [(call["group_type"], call["split_item"], call["group_list_type"]) for call in calls] == [
        (0, 2, 1),
        (0, 2, 1),
        (2, 3, 1),
    ]
    assert calls[2]["x"][0].stride == (1, 4)  # the transposed view that the kernel wants


def test_what_the_kernel_does_not_do_is_refused_before_the_call(fake_npu):
    with use_backend("npu"):
        with pytest.raises(OpsError, match="always divides by their sum"):
            moe_gating(torch.zeros(2, 4), 1, score="sigmoid", renormalize=False)
        with pytest.raises(OpsError, match="groups of 2 experts"):
            moe_gating(torch.zeros(2, 8), 1, score="sigmoid", num_groups=4)
        with pytest.raises(OpsError, match="2080 experts in 65 groups"):
            moe_gating(torch.zeros(2, 2080), 1, score="sigmoid", num_groups=65)
        with pytest.raises(OpsError, match="513 experts for a token"):
            moe_permute(torch.zeros(1, 4), torch.zeros(1, 513, dtype=torch.int64))
        with pytest.raises(OpsError, match="1025 matrices"):
            grouped_matmul(torch.zeros(1, 1), torch.zeros(1025, 1, 1), [1] + [0] * 1024)
    assert not fake_npu.calls


@pytest.mark.parametrize("backend", ["reference", "torch", "npu"])
def test_no_tokens_at_all_give_empty_results_and_gradients(fake_npu, backend):
    tokens, weights, by_map, logits = (torch.zeros(0, n, requires_grad=True) for n in (4, 2, 6, 6))
    experts, routing_map = torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 6, dtype=torch.bool)
    with use_backend(backend):
        gates, chosen = moe_gating(logits, 2, score="softmax")
        permuted, slots = moe_permute(tokens, experts)
        back = moe_unpermute(permuted, slots, weights)
        mapped, inside, places = moe_permute_map(tokens, routing_map, 2, by_map)
        mapped_back = moe_unpermute_map(mapped, places, routing_map, by_map)
    assert (permuted.shape, slots.shape, slots.dtype) == ((0, 4), (0,), torch.int32)
    assert (mapped.shape, inside.shape, places.shape) == ((0, 4), (0,), (0,))
    assert (back.shape, mapped_back.shape, gates.shape, chosen.shape) == ((0, 4), (0, 4), (0, 2), (0, 2))
    (back.sum() + mapped_back.sum() + inside.sum() + gates.sum()).backward()
    assert all(x.grad.shape == x.shape for x in (tokens, weights, by_map, logits))
    assert not fake_npu.calls


def test_no_rows_at_all_never_reach_the_kernel(fake_npu):
    weight = torch.ones(2, 4, 6, requires_grad=True)
    with use_backend("npu"):
        product = grouped_matmul(torch.zeros(0, 4), weight, [0, 0])
    product.sum().backward()
    assert product.shape == (0, 6)
    assert weight.grad.abs().sum() == 0
    assert not fake_npu.calls
