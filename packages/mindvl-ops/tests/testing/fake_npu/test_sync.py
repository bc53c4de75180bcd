# SPDX-License-Identifier: Apache-2.0
"""Every way to make the host wait is counted, in forward and backward; what stays on the device is not."""

import pytest
import torch

X = torch.tensor([1.0, 0.0, 2.0])

WAITS = {
    "item": lambda: X[0].item(),
    "bool": lambda: bool(X[0] > 0),
    "int": lambda: int(X[0]),
    "float": lambda: float(X[0]),
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "numpy": lambda: X.numpy(),
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(X > 0),
    "mask as index": lambda: X[X > 0],
    "masked_select": lambda: X.masked_select(X > 0),
    "unique": lambda: X.unique(),
    "equal": lambda: torch.equal(X, X),
    "torch.tensor": lambda: torch.tensor([X[0]]),
    "repeat_interleave": lambda: X.repeat_interleave(torch.tensor([1, 2, 0])),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_read_of_values_is_counted(fake_npu, name):
    WAITS[name]()
    assert len(fake_npu.syncs) == 1, fake_npu.syncs


def test_work_on_the_device_is_not_counted(fake_npu):
    y = (X * 2).sum() + X[torch.tensor([0, 2])].max()
    torch.where(X > 0, X, y)
    X.repeat_interleave(torch.tensor([1, 2, 0]), output_size=3)
    X.to(torch.float16)
    torch.tensor([1.0, 2.0])
    torch.tensor(3)
    assert fake_npu.syncs == []


def test_a_read_inside_a_backward_is_counted(fake_npu):
    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            grad.tolist()
            grad.sum().item()
            return grad

    Reading.apply(X.clone().requires_grad_()).sum().backward()
    assert fake_npu.syncs == ["tolist", "item"]


def test_what_the_simulator_reads_is_its_own_matter(fake_npu):
    x = torch.ones(5, 4)
    fake_npu.torch_npu.npu_grouped_matmul(
        [x], [torch.ones(1, 4, 3)], group_list=torch.tensor([5]), split_item=2, group_type=0
    )
    assert fake_npu.syncs == []


def test_once_per_step_is_reported_from_once_per_layer(fake_npu):
    query, ends = torch.ones(4, 1, 8), torch.tensor([1, 4])

    def layer(list_of_ends):
        fake_npu.torch_npu.npu_fusion_attention(
            query, query, query, 1, "TND", actual_seq_qlen=list_of_ends, actual_seq_kvlen=list_of_ends
        )

    once = ends.tolist()
    for _ in range(3):
        layer(once)
    assert fake_npu.syncs == ["tolist"]
    for _ in range(3):
        layer(ends.tolist())
    assert fake_npu.syncs == ["tolist"] * 4


def test_tensors_are_as_before_after_the_simulation(request):
    before = torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy
    request.getfixturevalue("fake_npu")
    assert before[0] is not torch.Tensor.tolist
    from mindvl_ops.testing.fake_npu import simulate

    with simulate() as inner:
        X.tolist()
    assert inner.syncs == ["tolist"]
