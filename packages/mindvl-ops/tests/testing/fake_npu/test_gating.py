# SPDX-License-Identifier: Apache-2.0
"""Gating against a loop over one token at a time; refusals."""

import math

import pytest
import torch

from mindvl_ops.testing.fake_npu import RefusedError


def _random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _one_token(row, k, bias, k_group, group_count, mode, sigmoid, factor):
    """Experts and weights of one token, by hand."""
    scores = [1 / (1 + math.exp(-v)) for v in row]
    if not sigmoid:
        weights = [math.exp(v - max(row)) for v in row]
        scores = [weight / sum(weights) for weight in weights]
    selecting = [score + b for score, b in zip(scores, bias, strict=True)]
    size = len(row) // group_count
    groups = [sorted(selecting[g * size : (g + 1) * size], reverse=True) for g in range(group_count)]
    best = [group[0] if mode == 0 else sum(group[:2]) for group in groups]
    kept = sorted(range(group_count), key=lambda g: (-best[g], g))[:k_group]
    candidates = [e for e in range(len(row)) if e // size in kept]
    experts = sorted(candidates, key=lambda e: (-selecting[e], e))[:k]
    chosen = [scores[e] for e in experts]
    total = sum(chosen) if sigmoid else 1.0
    return experts, [value / total * factor for value in chosen]


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(("k_group", "group_count", "mode"), [(1, 1, 0), (2, 4, 0), (2, 4, 1), (3, 3, 1)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gating_selects_with_the_bias_and_weighs_without_it(fake_npu, sigmoid, k_group, group_count, mode, with_bias):
    x = _random(0, 7, 12)
    bias = _random(1, 12) if with_bias else None
    weights, experts, scores = fake_npu.torch_npu.npu_moe_gating_top_k(
        x, 3, bias=bias, k_group=k_group, group_count=group_count, group_select_mode=mode, norm_type=int(sigmoid),
        routed_scaling_factor=2.5,
    )  # fmt: skip
    offsets = [0.0] * 12 if bias is None else bias.tolist()
    for t, row in enumerate(x.tolist()):
        wanted, values = _one_token(row, 3, offsets, k_group, group_count, mode, sigmoid, 2.5)
        assert experts[t].tolist() == wanted
        torch.testing.assert_close(weights[t], torch.tensor(values))
    assert experts.dtype == torch.int32
    assert scores.isnan().all()  # valid only if asked for


def test_the_scores_are_valid_when_asked_for(fake_npu):
    x = _random(0, 3, 8).bfloat16()
    weights, _, scores = fake_npu.torch_npu.npu_moe_gating_top_k(x, 2, norm_type=1, out_flag=True)
    torch.testing.assert_close(scores, x.float().sigmoid())
    assert weights.dtype == torch.bfloat16


def test_equal_scores_go_to_the_lower_expert(fake_npu):
    assert fake_npu.torch_npu.npu_moe_gating_top_k(torch.zeros(1, 8), 3)[1].tolist() == [[0, 1, 2]]


def test_hash_routing_looks_experts_up_by_token(fake_npu):
    table = torch.tensor([[3, 1], [0, 2]])
    ids = torch.tensor([1, 0, 1])
    x = _random(0, 3, 4)
    weights, experts, _ = fake_npu.torch_npu.npu_moe_gating_top_k(x, 2, input_ids=ids, tid2eid=table)
    assert experts.tolist() == [[0, 2], [3, 1], [0, 2]]
    torch.testing.assert_close(weights, x.softmax(-1).gather(1, experts.long()))


def test_the_gradient_reaches_x_and_the_bias_may_not_ask_for_one(fake_npu):
    x, bias = _random(0, 4, 8).requires_grad_(), _random(1, 8)
    weights, experts, scores = fake_npu.torch_npu.npu_moe_gating_top_k(x, 2, bias=bias, norm_type=1)
    dy = _random(2, 4, 2)
    (grad,) = torch.autograd.grad(weights, x, dy)
    picked = x.sigmoid().gather(1, experts.long())
    (expected,) = torch.autograd.grad(picked / picked.sum(-1, keepdim=True), x, dy)
    torch.testing.assert_close(grad, expected)
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'bias'"):
        fake_npu.torch_npu.npu_moe_gating_top_k(x, 2, bias=bias.clone().requires_grad_(), norm_type=1)
    assert not experts.requires_grad
    assert not scores.requires_grad


def test_softmax_gating_counts_rows_column_by_column_and_marks_finished_tokens(fake_npu):
    x = _random(0, 3, 5)
    finished = torch.tensor([False, True, False])
    weights, experts, row_idx = fake_npu.torch_npu.npu_moe_gating_top_k_softmax(x, finished, 2)
    values, order = x.softmax(-1).sort(-1, descending=True)
    torch.testing.assert_close(weights, values[:, :2])
    assert experts[0].tolist() == order[0, :2].tolist()
    assert experts[1].tolist() == [5, 5]
    assert row_idx.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert experts.dtype == row_idx.dtype == torch.int32
    assert fake_npu.torch_npu.npu_moe_gating_top_k_softmax(x[None], None, 2)[2].shape == (1, 3, 2)


X = torch.zeros(3, 12)
RULES = [
    ({"x": X[0]}, "x has rank 1"),
    ({"x": X.double()}, "x is torch.float64"),
    ({"x": torch.zeros(1, 2049)}, "E = 2049 is above 2048"),
    ({"bias": torch.zeros(11)}, r"bias must be torch.float32 \[12\]"),
    ({"bias": torch.zeros(12).half()}, "bias must be torch.float32"),
    ({"renorm": 1}, "renorm must be 0, got 1"),
    ({"norm_type": 2}, "norm_type 2 is neither"),
    ({"group_select_mode": 2}, "group_select_mode 2 is neither"),
    ({"input_ids": torch.zeros(3, dtype=torch.int64)}, "input_ids and tid2eid go together"),
    ({"group_count": 5}, "5 groups do not divide 12 experts"),
    ({"group_count": 4, "k_group": 5}, "k_group 5 is outside 1 to 4"),
    ({"group_count": 4, "k_group": 1, "k": 4}, "k = 4 is outside 1 to 3"),
    ({"group_count": 6, "k_group": 3}, "groups of 2 experts, at least 3 are needed"),
    ({"x": torch.zeros(1, 2048 - 32), "group_count": 96, "k_group": 3}, "make 3072, above 2048"),
]


@pytest.mark.parametrize(("change", "words"), RULES)
def test_a_broken_rule_is_named(fake_npu, change, words):
    with pytest.raises(RefusedError, match=words):
        fake_npu.torch_npu.npu_moe_gating_top_k(**{"x": X, "k": 2, **change})


def test_groups_of_two_pass_when_the_documented_limit_is_off(fake_npu):
    with fake_npu.relaxed(documented_limits=False):
        fake_npu.torch_npu.npu_moe_gating_top_k(X, 2, group_count=6, k_group=3, group_select_mode=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((X[0], None, 2), "x has rank 1, must be 2 or 3"),
        ((X.double(), None, 2), "x is torch.float64"),
        ((X, None, 13), "k = 13 is outside 1 to 12"),
        ((X, torch.zeros(3), 2), r"finished must be bool \[3\]"),
    ],
)
def test_a_broken_rule_of_the_softmax_form_is_named(fake_npu, arguments, words):
    with pytest.raises(RefusedError, match=words):
        fake_npu.torch_npu.npu_moe_gating_top_k_softmax(*arguments)
