# SPDX-License-Identifier: Apache-2.0
"""Permutation and grouped matmul of the torch backend equal the reference, whatever the shapes and strides."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from mindvl_ops import grouped_matmul, moe_permute, moe_permute_map, moe_unpermute, moe_unpermute_map, use_backend
from mindvl_ops.testing import assert_parity
from mindvl_ops.torch_backend.moe import _bounds, _by_groups, _by_rows

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(0, 20), k=st.integers(1, 4), width=st.integers(1, 9), dtype=dtypes, strided=st.booleans())
def test_permutation_there_and_back_equals_reference(tokens, k, width, dtype, strided):
    experts = torch.rand(tokens, 6).argsort(dim=1)[:, :k]
    routing_map = torch.zeros(tokens, 6, dtype=torch.bool).scatter_(1, experts, True)
    x = (torch.randn(width, tokens).T if strided else torch.randn(tokens, width)).to(dtype)
    factor, weights, by_map = (torch.randn(*s).to(dtype) for s in ((tokens * k, 1), (tokens, k), (tokens, 6)))

    def by_index(x, factor, weights):
        permuted, slots = moe_permute(x, experts)
        return moe_unpermute(permuted * factor, slots, weights)

    def inside(x, factor, weights):
        permuted, permuted_weights, slots = moe_permute_map(x, routing_map, k, weights)
        return moe_unpermute_map(permuted * factor * permuted_weights[:, None], slots, routing_map)

    def afterwards(x, factor, weights):
        permuted, _, slots = moe_permute_map(x, routing_map, k)
        return moe_unpermute_map(permuted * factor, slots, routing_map, weights)

    assert_parity(by_index, (x, factor, weights))
    if tokens:
        assert_parity(inside, (x, factor, by_map))
        assert_parity(afterwards, (x, factor, by_map))


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    dtype=dtypes,
    on_host=st.booleans(),
    strided=st.booleans(),
)
def test_grouped_matmul_equals_reference(sizes, dtype, on_host, strided):
    x = (torch.randn(4, sum(sizes)).T if strided else torch.randn(sum(sizes), 4)).to(dtype)
    weight = torch.randn(len(sizes), 4, 6).to(dtype)
    if strided:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert_parity(lambda x, w: grouped_matmul(x, w, sizes if on_host else torch.tensor(sizes)), (x, weight))


def test_the_kernel_for_cuda_gives_the_same_where_it_can_be_tried():
    """PyTorch has its grouped kernel on a CPU as well, slower than a loop; here it shows that the calls are right."""
    sizes = [3, 0, 5]
    bounds = _bounds(sizes, torch.device("cpu"))
    x, weight, grad = (torch.randn(*s).bfloat16() for s in ((8, 16), (3, 16, 8), (8, 8)))
    with use_backend("reference"):
        x.requires_grad_(), weight.requires_grad_()
        expected = grouped_matmul(x, weight, sizes)
        grad_x, grad_weight = torch.autograd.grad(expected, (x, weight), grad)
    with torch.no_grad():
        torch.testing.assert_close(torch._grouped_mm(x, weight, offs=bounds), expected)
        torch.testing.assert_close(torch._grouped_mm(grad, weight.transpose(1, 2), offs=bounds), grad_x)
        torch.testing.assert_close(torch._grouped_mm(x.t(), grad, offs=bounds), grad_weight)


def test_the_kernel_for_cuda_leaves_out_padding_rows():
    sizes = _bounds([3, 0, 4, 1], torch.device("cpu"))
    x, weight, grad = (torch.randn(*s).bfloat16() for s in ((8, 16), (3, 16, 8), (8, 8)))
    x[7], grad[7] = torch.nan, torch.nan
    assert not _by_rows(x, weight, sizes)[7].any()
    assert not _by_rows(grad, weight.transpose(1, 2), sizes)[7].any()
    torch.testing.assert_close(_by_rows(x, weight, sizes)[3:7], x[3:7] @ weight[2])
    torch.testing.assert_close(_by_groups(x, grad, sizes, 3)[2], x[3:7].T @ grad[3:7])


def test_the_grouped_kernel_is_called_as_its_schema_wants():
    """Fake CUDA tensors: no values, but the real schema and shapes of what runs on a GPU."""
    with FakeTensorMode():
        x, weight, grad = (
            torch.empty(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((48, 64), (3, 64, 32), (48, 32))
        )
        sizes = torch.empty(3, dtype=torch.int64, device="cuda")  # never read by the host: it has no values
        assert grouped_matmul(x, weight, sizes).shape == (48, 32)
        assert _by_rows(grad, weight.transpose(1, 2), _bounds(sizes, x.device)).shape == (48, 64)
        assert _by_groups(x, grad, _bounds([8, 0, 40], x.device), 3).shape == (3, 64, 32)
        padded = torch.empty(4, dtype=torch.int64, device="cuda")
        assert grouped_matmul(x, weight, padded).shape == (48, 32)
