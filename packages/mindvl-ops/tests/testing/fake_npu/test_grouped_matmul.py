# SPDX-License-Identifier: Apache-2.0
"""Grouped matmul against one product per group; the three products of its backward; refusals."""

import pytest
import torch

from mindvl_ops.testing.fake_npu import RefusedError

BF16 = torch.bfloat16
SIZES = [3, 0, 2]


def _random(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _ends(sizes):
    return [sum(sizes[: i + 1]) for i in range(len(sizes))]


@pytest.mark.parametrize("kind", [0, 1])
def test_groups_of_rows_meet_their_own_weight(fake_npu, kind):
    x, weight, bias = _random(0, 5, 4), _random(1, 3, 4, 6), _random(2, 3, 6)
    groups = torch.tensor(SIZES if kind else _ends(SIZES))
    common = {"group_list": groups, "split_item": 2, "group_type": 0, "group_list_type": kind}
    (plain,) = fake_npu.torch_npu.npu_grouped_matmul([x], [weight], **common)
    (biased,) = fake_npu.torch_npu.npu_grouped_matmul([x], [weight], bias=[bias], **common)
    for row, expert in enumerate([0, 0, 0, 2, 2]):
        torch.testing.assert_close(plain[row], x[row] @ weight[expert])
        torch.testing.assert_close(biased[row], x[row] @ weight[expert] + bias[expert])


def test_groups_of_the_inner_axis_give_one_matrix_each_and_zeros_for_the_empty_one(fake_npu):
    x, dy = _random(0, 5, 4), _random(1, 5, 6)
    (dw,) = fake_npu.torch_npu.npu_grouped_matmul(
        [x.T], [dy], group_list=torch.tensor(SIZES), split_item=3, group_type=2, group_list_type=1
    )
    assert dw.shape == (3, 4, 6)
    torch.testing.assert_close(dw[0], x[:3].T @ dy[:3])
    assert not dw[1].any()
    torch.testing.assert_close(dw[2], x[3:].T @ dy[3:])


def test_rows_after_the_last_group_are_not_written_and_enter_no_sum(fake_npu):
    x, dy = _random(0, 5, 4), _random(1, 5, 6)
    groups, rows = torch.tensor([1, 0, 2]), {"split_item": 2, "group_type": 0, "group_list_type": 1}
    (y,) = fake_npu.torch_npu.npu_grouped_matmul([x], [_random(2, 3, 4, 6)], group_list=groups, **rows)
    assert y.isnan().all(dim=1).tolist() == [False, False, False, True, True]
    (dw,) = fake_npu.torch_npu.npu_grouped_matmul([x.T], [dy], group_list=groups, **{**rows, "group_type": 2})
    torch.testing.assert_close(dw[2], x[1:3].T @ dy[1:3])


def test_three_grouped_products_are_forward_and_backward(fake_npu):
    x, weight, dy = _random(0, 5, 4).requires_grad_(), _random(1, 3, 4, 6).requires_grad_(), _random(2, 5, 6)
    expected = torch.cat([part @ w for part, w in zip(x.split(SIZES), weight, strict=True)])
    wanted_dx, wanted_dw = torch.autograd.grad(expected, (x, weight), dy)
    npu, groups = fake_npu.torch_npu, torch.tensor(SIZES)
    with torch.no_grad():
        rows = {"group_list": groups, "split_item": 2, "group_type": 0, "group_list_type": 1}
        (dx,) = npu.npu_grouped_matmul([dy], [weight.transpose(1, 2)], **rows)
        (dw,) = npu.npu_grouped_matmul([x.T], [dy], **{**rows, "group_type": 2, "split_item": 3})
    torch.testing.assert_close(dx, wanted_dx)
    torch.testing.assert_close(dw, wanted_dw)


def test_lists_of_pairs_give_lists_of_products(fake_npu):
    xs, weights = [_random(0, 2, 4), _random(1, 2, 3, 5)], [_random(2, 4, 6), _random(3, 5, 7)]
    biases = [_random(4, 6), _random(5, 7)]
    outputs = fake_npu.torch_npu.npu_grouped_matmul(xs, weights, bias=biases, group_type=-1)
    for output, x, weight, bias in zip(outputs, xs, weights, biases, strict=True):
        torch.testing.assert_close(output, x @ weight + bias)


@pytest.mark.parametrize("split_item", [0, 3])
def test_the_other_overload_takes_ends_on_the_host(fake_npu, split_item):
    x, weights = _random(0, 5, 4), [_random(i, 4, 6) for i in range(1, 4)]
    outputs = fake_npu.torch_npu.npu_grouped_matmul([x], weights, group_list=_ends(SIZES), split_item=split_item)
    expected = [part @ weight for part, weight in zip(x.split(SIZES), weights, strict=True)]
    assert len(outputs) == (3 if split_item == 0 else 1)
    torch.testing.assert_close(torch.cat(outputs), torch.cat(expected))
    assert fake_npu.calls[-1].op == "npu_grouped_matmul.List"


def test_sixteen_bit_sums_in_float32(fake_npu):
    x, weight = _random(0, 5, 512, dtype=BF16), _random(1, 1, 512, 6, dtype=BF16)
    (y,) = fake_npu.torch_npu.npu_grouped_matmul(
        [x], [weight], bias=[_random(2, 1, 6)], group_list=torch.tensor([5]), split_item=2, group_type=0
    )
    torch.testing.assert_close(y, (x.double() @ weight[0].double() + _random(2, 6)).to(BF16), rtol=8e-3, atol=1e-2)
    assert y.dtype == BF16


def test_the_accumulating_form_adds_into_its_input(fake_npu):
    total, x, weight = _random(0, 3, 4, 6), _random(1, 5, 4, dtype=BF16), _random(2, 5, 6, dtype=BF16)
    before = total.clone()
    ends = torch.tensor(_ends(SIZES))
    added = fake_npu.torch_npu.npu_grouped_matmul_add(total, x, weight, ends)
    assert torch.equal(total, before)
    returned = fake_npu.torch_npu.npu_grouped_matmul_add_(total, x, weight, ends)
    assert returned.data_ptr() == total.data_ptr()
    torch.testing.assert_close(total, added)
    torch.testing.assert_close(total[0] - before[0], x[:3].float().T @ weight[:3].float(), rtol=1e-4, atol=1e-5)
    assert torch.equal(total[1], before[1])


X, W, G = torch.zeros(5, 4), torch.zeros(3, 4, 6), torch.tensor(SIZES)
ROWS = {"x": [X], "weight": [W], "group_list": G, "split_item": 2, "group_type": 0, "group_list_type": 1}
INNER = {**ROWS, "x": [X.T], "weight": [torch.zeros(5, 6)], "group_type": 2}
LISTS = {"x": [X], "weight": [torch.zeros(4, 6)], "group_type": -1}
RULES = [
    (ROWS, {"group_type": None}, "group_type only supports -1, 0 and 2, but got None"),
    (ROWS, {"group_type": 1}, "group_type only supports -1, 0 and 2, but got 1"),
    (ROWS, {"split_item": 4}, "split_item 4 is outside 0 to 3"),
    (ROWS, {"split_item": 0}, "group_type 0 needs split_item 2 or 3, got 0"),
    (ROWS, {"x": []}, "number of x and weight should be greater than 0"),
    (ROWS, {"x": [X.double()]}, "x is torch.float64"),
    (ROWS, {"weight": [W.half()]}, "types differ, torch.float32 and torch.float16"),
    (ROWS, {"scale": [X]}, "scale is for quantised tensors"),
    (ROWS, {"per_token_scale": [X]}, "per_token_scale is for quantised tensors"),
    (ROWS, {"tuning_config": [1]}, "tuning_config is for quantised tensors"),
    (ROWS, {"act_type": 1}, "act_type must be 0, got 1"),
    (
        ROWS,
        {"x": [X.bfloat16()], "weight": [W.bfloat16()], "bias": [torch.zeros(3, 6).bfloat16()]},
        "must be torch.float32",
    ),
    (ROWS, {"group_list": None}, "group_type 0 needs a group_list"),
    (ROWS, {"group_list": G.int()}, "group_list is torch.int32, must be int64"),
    (ROWS, {"group_list": G[None]}, "group_list has rank 2, must be 1"),
    (ROWS, {"group_list": torch.zeros(1025, dtype=torch.int64)}, "1025 groups, at most 1024"),
    (ROWS, {"group_list_type": 2}, "group_list_type 2 is neither 0 nor 1"),
    (ROWS, {"group_list_type": 0}, r"\(cumulative ends\) must add up to at most 5"),
    (ROWS, {"group_list": torch.tensor([3, 0, 3])}, r"\(sizes\) must add up to at most 5"),
    (ROWS, {"group_list": torch.tensor([6, -1, 0])}, "must add up to at most 5"),
    (ROWS, {"group_list": torch.tensor([3, 2])}, "2 groups for 3 weights"),
    (ROWS, {"x": [X, X]}, "takes one x and one weight"),
    (ROWS, {"x": [X[None]]}, "x has rank 3"),
    (ROWS, {"weight": [W[0]]}, r"weight has rank 2, must be \[E, K, N\]"),
    (ROWS, {"weight": [W[:, :3]]}, "times weight"),
    (ROWS, {"x": [torch.zeros(4, 5).T]}, "takes no transposed view as x"),
    (ROWS, {"x": [torch.zeros(5, 65536)]}, "last axis of x 65536 is above 65535"),
    (INNER, {"x": [X.T.contiguous()]}, "needs x as a transposed view"),
    (INNER, {"weight": [W]}, r"weight has rank 3, must be \[K, N\]"),
    (INNER, {"weight": [torch.zeros(4, 6)]}, "times weight"),
    (INNER, {"bias": [torch.zeros(6)]}, "group_type 2 takes no bias"),
    (INNER, {"group_list": torch.tensor([3, 3, 0])}, "must add up to at most 5"),
    (LISTS, {"split_item": 2}, "group_type -1 needs split_item 0 or 1"),
    (LISTS, {"group_list": G}, "group_type -1 takes no group_list"),
    (LISTS, {"x": [X] * 129, "weight": [torch.zeros(4, 6)] * 129}, "at most 128 of each"),
    (LISTS, {"x": [X, X]}, "2 x and 1 weights"),
    (LISTS, {"x": [X[0]]}, "x has rank 1, must be 2 to 6"),
    (LISTS, {"weight": [W]}, "weight has rank 3, must be 2"),
    (LISTS, {"weight": [torch.zeros(5, 6)]}, "times weight"),
]


@pytest.mark.parametrize(("valid", "change", "words"), RULES)
def test_a_broken_rule_is_named(fake_npu, valid, change, words):
    fake_npu.torch_npu.npu_grouped_matmul(**valid)
    with pytest.raises(RefusedError, match=words):
        fake_npu.torch_npu.npu_grouped_matmul(**{**valid, **change})


WEIGHTS = [torch.zeros(4, 6)] * 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group_type": 0}, "group_type must be left out, got 0"),
        ({"split_item": 5}, "split_item 5 is outside 0 to 3"),
        ({"group_list": [1] * 129}, "129 groups in a list, at most 128"),
        ({"group_list": [3, 3, 4]}, "must end at 5"),
        ({"group_list": [3, 5]}, "2 groups for 3 weights"),
        ({"x": [X, X]}, r"needs one x \[M, K\]"),
    ],
)
def test_a_broken_rule_of_the_list_form_is_named(fake_npu, change, words):
    valid = {"x": [X], "weight": WEIGHTS, "group_list": [3, 3, 5], "split_item": 3}
    fake_npu.torch_npu.npu_grouped_matmul(**valid)
    with pytest.raises(RefusedError, match=words):
        fake_npu.torch_npu.npu_grouped_matmul(**{**valid, **change})


H = torch.zeros(5, 4).bfloat16()
ADD = {
    "input": torch.zeros(3, 4, 6),
    "x": H,
    "weight": torch.zeros(5, 6).bfloat16(),
    "group_list": torch.tensor([3, 3, 5]),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group_type": 0}, "group_type only supports 2, but got 0"),
        ({"transpose_x": False}, "transpose_x must be True"),
        ({"transpose_weight": True}, "transpose_weight False"),
        ({"input": torch.zeros(3, 4, 6).bfloat16()}, "input must be float32"),
        ({"x": H.float(), "weight": torch.zeros(5, 6)}, "must share a 16-bit type"),
        ({"weight": torch.zeros(5, 6).half()}, "must share a 16-bit type"),
        ({"input": torch.zeros(3, 4, 5)}, r"must be \[3, 4, 6\]"),
        ({"weight": torch.zeros(4, 6).bfloat16()}, "differ in rows"),
        ({"group_list_type": 1}, "is ignored on this device"),
        ({"group_list": torch.tensor([3, 0, 2])}, "must add up to at most 5"),
        ({"group_list": torch.tensor([3, 3, 4])}, "must end at 5"),
    ],
)
def test_a_broken_rule_of_the_accumulating_form_is_named(fake_npu, change, words):
    fake_npu.torch_npu.npu_grouped_matmul_add_(**ADD)
    with pytest.raises(RefusedError, match=words):
        fake_npu.torch_npu.npu_grouped_matmul_add_(**{**ADD, **change})


def test_the_accumulating_form_takes_its_groups_as_ends_whatever_their_type_says(fake_npu):
    with fake_npu.relaxed(cumulative_groups=False):
        fake_npu.torch_npu.npu_grouped_matmul_add_(**ADD, group_list_type=1)
