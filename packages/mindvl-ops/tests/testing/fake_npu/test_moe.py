# SPDX-License-Identifier: Apache-2.0
"""Permutations against loops over tokens and experts; round trips; gradients; refusals."""

import pytest
import torch

from mindvl_ops.testing.fake_npu import RefusedError

BF16 = torch.bfloat16


def _random(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _route(num_tokens=6, num_experts=4, slots=2):
    """`[T, K]` experts, different in every row, and the same as a map."""
    experts = torch.stack(
        [torch.randperm(num_experts, generator=torch.Generator().manual_seed(t))[:slots] for t in range(num_tokens)]
    )
    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(1, experts, True)
    return experts, routing_map


def test_permute_by_indices_sorts_slots_by_expert_and_keeps_their_order(fake_npu):
    tokens, (experts, _) = _random(0, 6, 3), _route()
    rows, sorted_indices = fake_npu.torch_npu.npu_moe_token_permute(tokens, experts)
    expected = [t for e in range(4) for t in range(6) for k in range(2) if experts[t, k] == e]
    assert torch.equal(rows, tokens[expected])
    assert sorted_indices.dtype == torch.int32
    for slot in range(12):
        assert torch.equal(rows[sorted_indices[slot]], tokens[slot // 2])


@pytest.mark.parametrize(("asked", "rows"), [(None, 12), (0, 12), (5, 5), (99, 12), (-2, 10)])
def test_num_out_tokens_cuts_the_rows(fake_npu, asked, rows):
    out, sorted_indices = fake_npu.torch_npu.npu_moe_token_permute(_random(0, 6, 3), _route()[0], asked)
    assert len(out) == rows
    assert len(sorted_indices) == 12


def test_one_expert_per_token_may_come_without_its_axis(fake_npu):
    tokens = _random(0, 3, 2)
    rows, back = fake_npu.torch_npu.npu_moe_token_permute(tokens, torch.tensor([2, 0, 1], dtype=torch.int32))
    assert torch.equal(rows, tokens[[1, 2, 0]])
    assert back.tolist() == [2, 0, 1]
    assert torch.equal(fake_npu.torch_npu.npu_moe_token_unpermute(rows, back), tokens)


def test_unpermute_weighs_and_sums_the_slots_of_a_token(fake_npu):
    tokens, (experts, _), probs = _random(0, 6, 3), _route(), _random(1, 6, 2)
    npu = fake_npu.torch_npu
    rows, back = npu.npu_moe_token_permute(tokens, experts)
    scaled = rows * torch.arange(12.0)[:, None]
    out = npu.npu_moe_token_unpermute(scaled, back, probs)
    for t in range(6):
        expected = sum(probs[t, k] * scaled[back[2 * t + k]] for k in range(2))
        torch.testing.assert_close(out[t], expected)


def test_sums_over_slots_run_in_float32_and_round_once(fake_npu):
    rows, probs = _random(0, 64 * 8, 4, dtype=BF16), _random(1, 64, 8)
    back = torch.arange(512, dtype=torch.int32)
    out = fake_npu.torch_npu.npu_moe_token_unpermute(rows, back, probs)
    exact = (rows.double().view(64, 8, 4) * probs.double()[..., None]).sum(1)
    assert out.dtype == BF16
    assert (out == exact.to(BF16)).float().mean() > 0.98  # equal but for ties that float32 turns


def test_gradients_of_the_index_form(fake_npu):
    experts = _route()[0]
    tokens, probs = _random(0, 6, 3).requires_grad_(), _random(1, 6, 2).requires_grad_()
    dy, npu = _random(2, 6, 3), fake_npu.torch_npu
    rows, back = npu.npu_moe_token_permute(tokens, experts)
    out = npu.npu_moe_token_unpermute(rows * rows, back, probs)
    grads = torch.autograd.grad(out, (tokens, probs), dy)
    expected = torch.autograd.grad(tokens.square() * probs.sum(1, keepdim=True), (tokens, probs), dy)
    for one, two in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert not back.requires_grad


def test_permute_by_map_goes_expert_by_expert(fake_npu):
    tokens, probs, (_, routing_map) = _random(0, 6, 3), _random(1, 6, 4), _route()
    npu = fake_npu.torch_npu
    rows, row_probs, order = npu.npu_moe_token_permute_with_routing_map(
        tokens, routing_map, probs=probs, num_out_tokens=12
    )
    pairs = [(t, e) for e in range(4) for t in range(6) if routing_map[t, e]]
    assert torch.equal(rows, tokens[[t for t, _ in pairs]])
    assert torch.equal(row_probs, torch.stack([probs[t, e] for t, e in pairs]))
    assert [pairs[i] for i in order.tolist()] == sorted(pairs)  # by token, slots in ascending expert order
    out = npu.npu_moe_token_unpermute_with_routing_map(rows, order, [6, 3], probs=probs, routing_map=routing_map)
    torch.testing.assert_close(out, tokens * (probs * routing_map).sum(1, keepdim=True))
    plain = npu.npu_moe_token_unpermute_with_routing_map(rows, order, [6, 3])
    torch.testing.assert_close(plain, 2 * tokens)


def test_the_default_of_num_out_tokens_means_one_expert(fake_npu):
    tokens, routing_map = _random(0, 3, 2), torch.eye(3, dtype=torch.bool)
    rows, row_probs, _ = fake_npu.torch_npu.npu_moe_token_permute_with_routing_map(tokens, routing_map)
    assert torch.equal(rows, tokens)
    assert row_probs is None
    with pytest.raises(RefusedError, match="every row of routing_map must have 1 ones"):
        fake_npu.torch_npu.npu_moe_token_permute_with_routing_map(_random(0, 6, 3), _route()[1])


def test_gradients_of_the_map_form(fake_npu):
    tokens, probs, routing_map = _random(0, 6, 3).requires_grad_(), _random(1, 6, 4).requires_grad_(), _route()[1]
    npu = fake_npu.torch_npu
    rows, row_probs, order = npu.npu_moe_token_permute_with_routing_map(
        tokens, routing_map, probs=probs, num_out_tokens=12
    )
    out = npu.npu_moe_token_unpermute_with_routing_map(rows * row_probs[:, None], order, [6, 3])
    grads = torch.autograd.grad(out, (tokens, probs), _random(2, 6, 3))
    expected = torch.autograd.grad(
        tokens * (probs * routing_map).sum(1, keepdim=True), (tokens, probs), _random(2, 6, 3)
    )
    for one, two in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_padded_experts_have_equal_room(fake_npu):
    tokens, probs = _random(0, 4, 3), _random(1, 4, 2)
    routing_map = torch.tensor([[1, 0], [1, 0], [1, 1], [0, 1]], dtype=torch.bool)
    npu = fake_npu.torch_npu
    rows, row_probs, token_of = npu.npu_moe_token_permute_with_routing_map(
        tokens, routing_map, probs=probs, num_out_tokens=4, drop_and_pad=True
    )
    assert token_of.tolist() == [0, 1, 2, 3]  # the third token of expert 0 is dropped
    assert torch.equal(rows, tokens)
    assert torch.equal(row_probs, torch.stack([probs[0, 0], probs[1, 0], probs[2, 1], probs[3, 1]]))
    out = npu.npu_moe_token_unpermute_with_routing_map(
        rows, token_of, [4, 3], probs=probs, routing_map=routing_map, drop_and_pad=True
    )
    torch.testing.assert_close(out, tokens * row_probs[:, None])


def test_uneven_rows_of_a_map_pass_when_their_flag_is_off(fake_npu):
    routing_map = torch.tensor([[1, 1], [0, 0]], dtype=torch.bool)
    with fake_npu.relaxed(routing_rows=False):
        rows, *_ = fake_npu.torch_npu.npu_moe_token_permute_with_routing_map(_random(0, 2, 3), routing_map)
    assert len(rows) == 2


def test_init_routing_follows_row_indices(fake_npu):
    x = _random(0, 4, 3)
    experts = torch.tensor([[2, 0], [1, 2], [0, 1], [0, 2]], dtype=torch.int32)
    row_idx = torch.arange(8, dtype=torch.int32).view(2, 4).T.contiguous()  # column major, as the gating gives it
    rows, where, sorted_experts = fake_npu.torch_npu.npu_moe_init_routing(x, row_idx, experts, 4)
    slots = sorted((int(experts[t, k]), 2 * t + k) for t in range(4) for k in range(2))
    assert sorted_experts.tolist() == [expert for expert, _ in slots]
    assert torch.equal(rows, x[[slot // 2 for _, slot in slots]])
    for position, (_, slot) in enumerate(slots):
        assert where[row_idx[slot // 2, slot % 2]] == position
    assert len(fake_npu.torch_npu.npu_moe_init_routing(x, row_idx, experts, 3)[0]) == 6


E, MAP = _route()
T = _random(0, 6, 3)
BACK = torch.arange(12, dtype=torch.int32)
WIDE = torch.zeros(2, 600, dtype=torch.int64)
PERMUTE, UNPERMUTE = "npu_moe_token_permute", "npu_moe_token_unpermute"
RULES = [
    (PERMUTE, {"tokens": T[0], "indices": E}, "tokens have rank 1"),
    (PERMUTE, {"tokens": T.double(), "indices": E}, "tokens is torch.float64"),
    (PERMUTE, {"tokens": T, "indices": E, "padded_mode": True}, "padded_mode must be False"),
    (PERMUTE, {"tokens": T, "indices": E.float()}, "indices are torch.float32"),
    (PERMUTE, {"tokens": T, "indices": E[None]}, "indices have rank 3"),
    (PERMUTE, {"tokens": T, "indices": E[:5]}, "5 rows of indices for 6 tokens"),
    (PERMUTE, {"tokens": T[:2], "indices": WIDE}, "K = 600 is above 512"),
    (
        PERMUTE,
        {"tokens": T[:1, :1].expand(40000, 1), "indices": E[:1, :1].expand(40000, 500)},
        r"T\*K = 20000000 must be below",
    ),
    (UNPERMUTE, {"permuted_tokens": T, "sorted_indices": BACK[:6], "padded_mode": True}, "padded_mode must be False"),
    (
        UNPERMUTE,
        {"permuted_tokens": T, "sorted_indices": BACK[:6], "restore_shape": [6, 3]},
        "restore_shape must be None",
    ),
    (UNPERMUTE, {"permuted_tokens": T, "sorted_indices": BACK[:6].long()}, "sorted_indices are torch.int64"),
    (UNPERMUTE, {"permuted_tokens": T, "sorted_indices": BACK[:6, None]}, "sorted_indices have rank 2"),
    (UNPERMUTE, {"permuted_tokens": T, "sorted_indices": BACK}, "point outside 6 rows"),
    (UNPERMUTE, {"permuted_tokens": T, "sorted_indices": BACK[:6], "probs": T[:, 0]}, "probs have rank 1"),
    (UNPERMUTE, {"permuted_tokens": T, "sorted_indices": BACK[:6], "probs": T}, "18 probs for 6 indices"),
    (
        UNPERMUTE,
        {"permuted_tokens": T, "sorted_indices": BACK[:6], "probs": T[:, :1].bfloat16()},
        "probs torch.bfloat16 do not go with tokens torch.float32",
    ),
]
BY_MAP = {"tokens": T, "routing_map": MAP, "num_out_tokens": 12}
BACK_BY_MAP = {"permuted_tokens": _random(0, 12, 3), "sorted_indices": BACK, "restore_shape": [6, 3]}
MAP_RULES = [
    ({"routing_map": MAP.int()}, "routing_map is torch.int32"),
    ({"routing_map": MAP[:5]}, r"routing_map \[5, 4\] must be \[6, E\]"),
    ({"probs": T}, "probs .* differ in shape from routing_map"),
    ({"probs": torch.zeros(6, 4).half()}, "probs torch.float16 do not go with"),
    ({"num_out_tokens": 18}, "must have 3 ones"),
    ({"num_out_tokens": 6 * 512}, "K = 512 must be below 512"),
    ({"num_out_tokens": 3, "drop_and_pad": True}, "capacity 0 must be 1 to 6"),
    ({"num_out_tokens": 28, "drop_and_pad": True}, "capacity 7 must be 1 to 6"),
]
BACK_RULES = [
    ({"restore_shape": [6, 4]}, r"restore_shape \[6, 4\] must be \[T, 3\]"),
    ({"restore_shape": [5, 3]}, "12 rows are no multiple of 5 tokens"),
    ({"probs": torch.zeros(6, 4)}, "probs need a routing_map"),
    ({"sorted_indices": BACK[:6]}, "6 sorted_indices for 12 rows"),
    ({"sorted_indices": BACK + 1}, "point outside 12 rows"),
    ({"sorted_indices": BACK, "drop_and_pad": True}, "point outside 6 rows"),
    ({"routing_map": MAP[:, :3], "probs": torch.zeros(6, 4)}, "every row of routing_map must have 2"),
    ({"routing_map": MAP, "probs": torch.zeros(6, 3)}, "probs .* differ in shape"),
]


@pytest.mark.parametrize(("op", "call", "words"), RULES)
def test_a_broken_rule_of_the_index_form_is_named(fake_npu, op, call, words):
    with pytest.raises(RefusedError, match=words):
        getattr(fake_npu.torch_npu, op)(**call)


@pytest.mark.parametrize(("change", "words"), MAP_RULES)
def test_a_broken_rule_of_the_map_form_is_named(fake_npu, change, words):
    fake_npu.torch_npu.npu_moe_token_permute_with_routing_map(**BY_MAP)
    with pytest.raises(RefusedError, match=words):
        fake_npu.torch_npu.npu_moe_token_permute_with_routing_map(**{**BY_MAP, **change})


@pytest.mark.parametrize(("change", "words"), BACK_RULES)
def test_a_broken_rule_of_its_inverse_is_named(fake_npu, change, words):
    fake_npu.torch_npu.npu_moe_token_unpermute_with_routing_map(**BACK_BY_MAP)
    with pytest.raises(RefusedError, match=words):
        fake_npu.torch_npu.npu_moe_token_unpermute_with_routing_map(**{**BACK_BY_MAP, **change})


def test_init_routing_takes_int32_of_one_shape(fake_npu):
    npu, idx = fake_npu.torch_npu, torch.zeros(6, 2, dtype=torch.int32)
    with pytest.raises(RefusedError, match="the indices must be int32"):
        npu.npu_moe_init_routing(T, idx, idx.long(), 6)
    with pytest.raises(RefusedError, match=r"must be \[6, K\]"):
        npu.npu_moe_init_routing(T, idx, idx[:, :1], 6)
