# SPDX-License-Identifier: Apache-2.0
"""Second derivatives: of every operator they are those of the reference, or they are refused; never silently wrong."""

import pytest
import torch
from torch import Tensor

from mindvl_ops import (
    OpsError,
    Segments,
    VocabularyShard,
    attention,
    cross_entropy,
    grouped_matmul,
    linear_cross_entropy,
    moe_gating,
    moe_permute,
    moe_permute_map,
    moe_unpermute,
    moe_unpermute_map,
    patch_embed,
    rms_norm,
    rotary,
    rotary_tables,
    scaled_masked_softmax,
    swiglu,
    use_backend,
)
from mindvl_ops.torch_backend import loss
from mindvl_ops.torch_backend.derivatives import gradients_of_reference

EXPERTS = torch.tensor([[2, 0], [0, 1], [2, 1]])
ROUTING_MAP = torch.zeros(3, 3, dtype=torch.bool).scatter_(1, EXPERTS, True)
SLOTS = moe_permute(torch.zeros(3, 1), EXPERTS)[1]
LABELS = torch.tensor([1, -100, 0])
TABLES = rotary_tables(torch.arange(3), 4, 10000.0)
NEIGHBOURS = rotary_tables(torch.arange(3), 4, 10000.0, interleaved=True)
BLOCKED = torch.ones(1, 1, 3, 3, dtype=torch.bool).triu(1)

CASES = {
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), (2, 3), (3,)),
    "rotary": (lambda x: rotary(x, *TABLES), (3, 2, 4)),
    "rotary, interleaved": (lambda x: rotary(x, *NEIGHBOURS, interleaved=True), (3, 2, 4)),
    "swiglu": (swiglu, (2, 6)),
    "scaled_masked_softmax": (lambda x: scaled_masked_softmax(x, BLOCKED, 0.5), (1, 2, 3, 3)),
    "cross_entropy": (lambda x: cross_entropy(x, LABELS), (3, 4)),
    "linear_cross_entropy": (lambda h, w: linear_cross_entropy(h, w, LABELS), (3, 2), (4, 2)),
    "patch_embed": (patch_embed, (2, 3), (4, 3)),
    "grouped_matmul": (lambda x, w: grouped_matmul(x, w, [2, 0, 1]), (3, 2), (3, 2, 2)),
    "moe_gating": (lambda x: moe_gating(x, 2, score="softmax", scaling=2.5)[0], (3, 4)),
    "moe_permute": (lambda x: moe_permute(x, EXPERTS)[0].square(), (3, 2)),
    "moe_permute_map": (lambda x: moe_permute_map(x, ROUTING_MAP, 2)[0].square(), (3, 2)),
    "moe_unpermute": (lambda x, w: moe_unpermute(x, SLOTS, w), (6, 2), (3, 2)),
    "moe_unpermute_map": (lambda x, w: moe_unpermute_map(x, SLOTS, ROUTING_MAP, w), (6, 2), (3, 3)),
}
FROZEN_CASES = {
    "grouped_matmul, frozen": (
        lambda x: grouped_matmul(x.square(), torch.ones(3, 2, 2, dtype=x.dtype), [2, 0, 1]),
        (3, 2),
    ),
}


@pytest.mark.parametrize("name", CASES | FROZEN_CASES)
def test_second_derivatives_of_the_torch_backend_are_right(name, monkeypatch):
    monkeypatch.setattr(loss, "_CHUNK_ELEMENTS", 4)  # so that the loss is computed in pieces
    function, *shapes = (CASES | FROZEN_CASES)[name]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    with use_backend("torch"):
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", ["grouped_matmul", "grouped_matmul, frozen", "rotary", "rotary, interleaved"])
def test_second_derivatives_of_our_own_functions_of_the_npu_backend_are_right(fake_npu, name):
    function, *shapes = (CASES | FROZEN_CASES)[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    found = {}
    for backend in ("npu", "reference"):
        with use_backend(backend):
            first = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
            found[backend] = torch.autograd.grad(sum(x.square().sum() for x in first), inputs)
    torch.testing.assert_close(found["npu"], found["reference"])


def test_second_derivatives_of_attention_are_refused_by_pytorch():
    query, key, value = (torch.randn(3, 1, 4, requires_grad=True) for _ in range(3))
    with use_backend("torch"):
        output = attention(query, key, value, Segments([3]), causal=True)
    (first,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="is not implemented"):
        first.sum().backward()


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_second_derivatives_over_a_sharded_vocabulary_are_refused(backend):
    shard = VocabularyShard(0, lambda x: x, lambda x: x)
    hidden, weight = torch.randn(3, 2, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    with use_backend(backend):
        for result in (
            cross_entropy(hidden @ weight.T, LABELS, shard=shard),
            linear_cross_entropy(hidden, weight, LABELS, shard=shard),
        ):
            with pytest.raises(OpsError, match="second derivative"):
                torch.autograd.grad(result.sum(), hidden, create_graph=True)


def test_a_tensor_given_twice_gets_the_gradient_of_each_place():
    x = torch.tensor([2.0], requires_grad=True)

    def product(a: Tensor, b: Tensor, factor: float) -> Tensor:
        return a.square() * b * factor

    found = gradients_of_reference(product, (x, x, 3.0), torch.ones(1))
    assert [None if g is None else g.item() for g in found] == [2 * 2 * 2 * 3, 4 * 3, None]


NPU_CASES = {name: case for name, case in CASES.items() if name.split(",")[0] not in (
    "cross_entropy", "linear_cross_entropy", "patch_embed", "grouped_matmul", "rotary", "scaled_masked_softmax"
)} | {
    "attention": (lambda x: attention(x, x, x, Segments([3]), causal=True), (3, 1, 4)),
    "scaled_masked_softmax": (
        lambda x: scaled_masked_softmax(x, torch.zeros(1, 1, 32, 32, dtype=torch.bool), 0.5), (1, 1, 32, 32)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NPU_CASES)
def test_second_derivatives_of_npu_kernels_are_refused(fake_npu, name):
    """The wheel warns once and leaves them out."""
    function, *shapes = NPU_CASES[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with use_backend("npu"):
        output = function(*inputs)
        with pytest.raises(OpsError, match=r"has no second derivative.*backend reference"):
            torch.autograd.grad(output.sum(), inputs, create_graph=True)
        function(*inputs).sum().backward()  # the first is not touched
    assert all(x.grad is not None for x in inputs)
