# SPDX-License-Identifier: Apache-2.0
"""Gating: by hand, against a loop that follows the papers, ties, the bias and its update."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_ops import OpsError, moe_gating, updated_expert_bias


def test_softmax_weights_of_the_chosen_are_their_share():
    logits = torch.tensor([[math.log(1.0), math.log(5.0), math.log(2.0)]])
    weights, experts = moe_gating(logits, 2, score="softmax", renormalize=False)
    assert experts.tolist() == [[1, 2]]
    assert experts.dtype == torch.int32
    torch.testing.assert_close(weights, torch.tensor([[5 / 8, 2 / 8]]))
    weights, _ = moe_gating(logits, 2, score="softmax", scaling=2.0)
    torch.testing.assert_close(weights, torch.tensor([[10 / 7, 4 / 7]]))


def test_the_bias_chooses_and_does_not_weigh():
    logits, bias = torch.zeros(1, 3), torch.tensor([0.0, 0.0, 1.0])
    weights, experts = moe_gating(logits, 1, score="sigmoid", bias=bias, renormalize=False)
    assert (experts.tolist(), weights.tolist()) == ([[2]], [[0.5]])


def test_of_equal_experts_the_lower_number_goes_first():
    _, experts = moe_gating(torch.zeros(2, 8), 3, score="sigmoid", num_groups=4, top_groups=2)
    assert experts.tolist() == [[0, 1, 2]] * 2


def _by_hand(row, bias, k, groups, top, scaling):
    """One token, as section 2.1.2 of DeepSeek-V3 tells it, in plain Python."""
    scores = [1 / (1 + math.exp(-x)) for x in row]
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(row) // groups
    of_group = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: -of_group[g])[:top]
    allowed = [e for e in range(len(row)) if e // size in kept]
    best = sorted(allowed, key=lambda e: -choice[e])[:k]
    total = sum(scores[e] for e in best)
    return best, [scores[e] / total * scaling for e in best]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), groups=st.sampled_from([2, 4]), top=st.integers(1, 2), k=st.integers(1, 4))
def test_sigmoid_gating_equals_the_paper(seed, groups, top, k):
    generator = torch.Generator().manual_seed(seed)
    logits, bias = torch.randn(5, 16, generator=generator).double(), torch.randn(16, generator=generator).double()
    weights, experts = moe_gating(logits, k, score="sigmoid", bias=bias, num_groups=groups, top_groups=top, scaling=2.5)
    for token in range(5):
        best, expected = _by_hand(logits[token].tolist(), bias.tolist(), k, groups, top, 2.5)
        assert experts[token].tolist() == best
        torch.testing.assert_close(weights[token], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_gradients_are_right_in_float64(score, renormalize):
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: moe_gating(x, 2, score=score, renormalize=renormalize, scaling=1.5)[0], (logits,)
    )


def test_the_bias_rises_for_experts_with_little_to_do():
    bias = updated_expert_bias(torch.zeros(3), torch.tensor([10, 2, 6]), 0.25)
    assert bias.tolist() == [-0.25, 0.25, 0.0]


def test_sizes_that_do_not_fit_are_refused():
    logits = torch.zeros(2, 8)
    with pytest.raises(OpsError, match="in 3 groups"):
        moe_gating(logits, 1, score="sigmoid", num_groups=3)
    with pytest.raises(OpsError, match="k=5 of 1 groups of 4"):
        moe_gating(logits, 5, score="sigmoid", num_groups=2, top_groups=1)
    with pytest.raises(OpsError, match="score 'relu' is not known"):
        moe_gating(logits, 1, score="relu")
    with pytest.raises(OpsError, match="bias"):
        moe_gating(logits, 1, score="sigmoid", bias=torch.zeros(7))
