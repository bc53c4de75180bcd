# SPDX-License-Identifier: Apache-2.0
"""Token loss and patch embedding of the torch backend equal the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_ops import cross_entropy, patch_embed
from mindvl_ops.testing import assert_parity
from mindvl_ops.torch_backend import dense


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 12),
    vocabulary=st.integers(1, 30),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 100),
)
def test_cross_entropy_equals_reference(tokens, vocabulary, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = -100
    logits = torch.randn(tokens, vocabulary, generator=generator).to(dtype)
    assert_parity(lambda x: cross_entropy(x, labels), (logits,))


def test_chunks_of_rows_change_nothing(monkeypatch):
    logits, labels = torch.randn(11, 7).bfloat16().requires_grad_(), torch.tensor([0, 6, -100, 3] * 2 + [1, 2, 5])
    whole = cross_entropy(logits, labels)
    (whole_grad,) = torch.autograd.grad(whole.sum(), logits)
    monkeypatch.setattr(dense, "_CHUNK_ELEMENTS", 21)
    chunked = cross_entropy(logits, labels)
    (chunked_grad,) = torch.autograd.grad(chunked.sum(), logits)
    assert torch.equal(whole, chunked)
    assert torch.equal(whole_grad, chunked_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patch_embed_equals_reference(dtype):
    assert_parity(patch_embed, (torch.randn(9, 12).to(dtype), torch.randn(5, 12).to(dtype)))
