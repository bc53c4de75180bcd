# SPDX-License-Identifier: Apache-2.0
"""Launches, bytes and FLOPs of operators, against counts by hand."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mindvl_ops import use_backend
from mindvl_ops.cases import cases
from mindvl_ops.traffic import TrafficCounter


def counted(function, *inputs):
    with TrafficCounter() as counter:
        function(*inputs)
    return {row.operator: (row.launches, row.bytes, row.flops) for row in counter.operators.values()}


def test_a_sum_reads_two_tensors_and_writes_one():
    x, y = torch.zeros(4, 8), torch.zeros(4, 8).half()
    assert counted(lambda: x + y) == {"aten.add.Tensor": (1, 128 + 64 + 128, 0)}
    assert counted(lambda: x + x) == {"aten.add.Tensor": (1, 128 + 128, 0)}


def test_views_and_allocations_are_no_launches():
    x = torch.zeros(4, 8)
    assert counted(lambda: (x.view(8, 4).t()[1:].unsqueeze(0), x.detach(), torch.empty_like(x), x.split(2))) == {}


def test_what_is_written_in_place_is_read_and_written_and_what_is_overwritten_only_written():
    x, y = torch.zeros(4, 8), torch.zeros(4, 8)
    assert counted(lambda: x.add_(y)) == {"aten.add_.Tensor": (1, 3 * 128, 0)}
    assert counted(lambda: x[:2].copy_(y[2:])) == {"aten.copy_.default": (1, 2 * 64, 0)}
    assert counted(lambda: torch.mul(x, y, out=torch.empty(4, 8))) == {"aten.mul.out": (1, 3 * 128, 0)}
    assert counted(x.zero_) == {"aten.zero_.default": (1, 128, 0)}


def test_an_expanded_axis_is_read_once():
    x = torch.zeros(4, 1).expand(4, 8)
    assert counted(lambda: x * 2.0) == {"aten.mul.Tensor": (1, 16 + 128, 0)}


def test_products_count_their_multiplications_and_additions():
    x, y = torch.zeros(4, 8), torch.zeros(8, 2)
    assert counted(lambda: x @ y) == {"aten.mm.default": (1, 4 * (32 + 16 + 8), 2 * 4 * 8 * 2)}


def test_totals_are_by_kind_and_include_the_backward_pass_on_fake_tensors():
    with FakeTensorMode():
        x, w = torch.zeros(4, 8, requires_grad=True), torch.zeros(8, 8, requires_grad=True)
        q, grad = torch.zeros(1, 2, 16, 8), torch.zeros(4, 8)
        with TrafficCounter() as counter:
            (x @ w).relu().backward(grad)
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert (counter.total("matmul").launches, counter.total("attention").launches) == (3, 1)
    assert counter.total("matmul").flops == 3 * 2 * 4 * 8 * 8
    assert counter.total("other").bytes == 2 * 128 + 3 * 128  # relu and its gradient
    assert counter.total().launches == 6


def test_a_fused_kernel_reads_its_inputs_and_writes_its_results_once():
    """SwiGLU of [32, 256] in 16 bit: 16 KiB in and 8 KiB out; backward 8 + 16 KiB in and 16 KiB out."""
    case = cases(torch.bfloat16, tokens=32)["swiglu"]
    with FakeTensorMode() as mode, use_backend("triton"):
        x = mode.from_tensor(case.inputs[0]).requires_grad_()
        assert x.shape == (32, 256)
        with TrafficCounter() as counter:
            y = case.function(x)
            y.backward(torch.zeros_like(y, memory_format=torch.contiguous_format))
    rows = counter.operators
    assert (rows["mindvl.swiglu.default"].launches, rows["mindvl.swiglu.default"].bytes) == (1, 24 * 1024)
    assert rows["mindvl.swiglu_backward.default"].bytes == 40 * 1024
