# SPDX-License-Identifier: Apache-2.0
"""Token losses of the torch backend: equal the reference in one piece, in many pieces, and over two processes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_ops import cross_entropy, linear_cross_entropy
from mindvl_ops.testing import assert_parity
from mindvl_ops.torch_backend import loss

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


def _labels(tokens, vocabulary, generator):
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = -100
    return labels


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 12), vocabulary=st.integers(1, 30), dtype=dtypes, seed=st.integers(0, 100),
    elements=st.sampled_from([1, 40, 10**6]),
)  # fmt: skip
def test_cross_entropy_equals_reference_for_any_pieces(tokens, vocabulary, dtype, seed, elements):
    generator = torch.Generator().manual_seed(seed)
    labels = _labels(tokens, vocabulary, generator)
    logits = torch.randn(tokens, vocabulary, generator=generator).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "_CHUNK_ELEMENTS", elements)
        assert_parity(lambda x: cross_entropy(x, labels), (logits,))


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 12), vocabulary=st.integers(1, 30), width=st.integers(1, 9), dtype=dtypes,
    seed=st.integers(0, 100), columns=st.integers(1, 31),
)  # fmt: skip
def test_linear_cross_entropy_equals_reference_for_any_pieces(tokens, vocabulary, width, dtype, seed, columns):
    generator = torch.Generator().manual_seed(seed)
    labels = _labels(tokens, vocabulary, generator)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "_LEAST_COLUMNS", 1)
        patch.setattr(loss, "_CHUNK_ELEMENTS", columns * max(1, tokens))
        assert_parity(lambda h, w: linear_cross_entropy(h, w, labels), (hidden, weight))


def test_chunks_of_rows_change_nothing(monkeypatch):
    logits, labels = torch.randn(11, 7).bfloat16().requires_grad_(), torch.tensor([0, 6, -100, 3] * 2 + [1, 2, 5])
    whole = cross_entropy(logits, labels)
    (whole_grad,) = torch.autograd.grad(whole.sum(), logits)
    monkeypatch.setattr(loss, "_CHUNK_ELEMENTS", 21)
    chunked = cross_entropy(logits, labels)
    (chunked_grad,) = torch.autograd.grad(chunked.sum(), logits)
    assert torch.equal(whole, chunked)
    assert torch.equal(whole_grad, chunked_grad)


def test_a_frozen_weight_gets_no_gradient():
    hidden = torch.randn(3, 4, requires_grad=True)
    linear_cross_entropy(hidden, torch.randn(5, 4), torch.tensor([0, 1, 4])).sum().backward()
    assert hidden.grad.abs().sum() > 0


def test_no_tensor_of_all_logits_in_float32_is_made(monkeypatch):
    """Watch every tensor that any operator makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (result if isinstance(result, tuple) else (result,)) if hasattr(x, "numel"))
            return result

    monkeypatch.setattr(loss, "_CHUNK_ELEMENTS", 64 * 100)
    monkeypatch.setattr(loss, "_LEAST_COLUMNS", 1)
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    labels = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(0))
    with Watch():
        linear_cross_entropy(hidden, weight, labels).sum().backward()
    assert max(sizes) == weight.numel() == 8000  # the gradient of the weight; all logits would be 64,000
