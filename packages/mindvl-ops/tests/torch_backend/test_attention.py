# SPDX-License-Identifier: Apache-2.0
"""The torch backend of attention equals the reference for random shapes, layouts and flags."""

from itertools import pairwise

import pytest
import torch
import torch.nn.attention.varlen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from mindvl_ops import Segments, attention, use_backend
from mindvl_ops.testing import assert_close, assert_parity
from mindvl_ops.torch_backend import attention as attention_module
from mindvl_ops.torch_backend.attention import _sums

layouts = st.one_of(
    st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    st.integers(1, 12).map(lambda count: [1] * count),
    st.integers(1, 6).map(lambda count: [9] * count),
    st.just([150]),
    st.just([1, 150, 1]),
)
split_packs = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5
).filter(lambda rows: any(queries for queries, _, _ in rows))
windows = st.one_of(st.none(), st.tuples(st.integers(-1, 5), st.integers(-1, 5)))


@settings(max_examples=60, deadline=None)
@given(
    lengths=layouts,
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    widths=st.sampled_from([(8, 8), (8, 4), (4, 8), (3, 3)]),
    causal=st.booleans(),
    window=windows,
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_torch_equals_reference(lengths, heads, widths, causal, window, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    query = torch.randn(total, heads[0], widths[0], generator=generator).to(dtype)
    key = torch.randn(total, heads[1], widths[0], generator=generator).to(dtype)
    value = torch.randn(total, heads[1], widths[1], generator=generator).to(dtype)
    segments = Segments(lengths)
    assert_parity(lambda q, k, v: attention(q, k, v, segments, causal=causal, window=window), (query, key, value))


@settings(max_examples=40, deadline=None)
@given(rows=split_packs, causal=st.booleans(), window=windows, widths=st.sampled_from([(8, 8), (12, 8), (4, 8)]))
def test_split_packs_equal_the_reference(rows, causal, window, widths):
    """Each segment has keys before its queries and after them."""
    segments = Segments(
        [queries for queries, _, _ in rows],
        [before + queries + after for queries, before, after in rows],
        offsets=[before for _, before, _ in rows],
    )
    query = torch.randn(segments.total, 4, widths[0])
    key, value = torch.randn(segments.key_total, 2, widths[0]), torch.randn(segments.key_total, 2, widths[1])
    assert_parity(lambda q, k, v: attention(q, k, v, segments, causal=causal, window=window), (query, key, value))


@settings(max_examples=30, deadline=None)
@given(lengths=layouts, causal=st.booleans(), window=windows, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_statistics_equal_the_reference(lengths, causal, window, dtype):
    segments = Segments(lengths)
    qkv = [torch.randn(segments.total, heads, 8).to(dtype) for heads in (4, 2, 2)]
    flags = {"causal": causal, "window": window, "return_logsumexp": True}
    with use_backend("reference"):
        expected = attention(*(x.double() for x in qkv), segments, **flags)
    actual = attention(*qkv, segments, **flags)
    for name, left, right in zip(("output", "logsumexp"), actual, expected, strict=True):
        assert_close(left, right, dtype=dtype, name=name)
    assert actual[1].dtype == torch.float32


def test_the_way_for_devices_without_statistics_gives_the_same():
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    keep = torch.rand(2, 1, 1, 5) < 0.7
    keep[..., 0] = True
    group = key.repeat_interleave(2, dim=1)
    for causal, mask in ((False, None), (True, None), (False, keep)):
        logits = query @ group.transpose(2, 3) * 0.5
        if causal:
            logits = logits.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        torch.testing.assert_close(_sums(query, key, mask, causal, 0.5), logits.logsumexp(dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_attention_has_narrower_values(dtype):
    """The shapes of DeepSeek-V3: keys of 128 + 64, values of 128."""
    segments = Segments([9, 1, 14])
    query, key, value = (torch.randn(24, 2, width).to(dtype) for width in (192, 192, 128))
    assert attention(query, key, value, segments, causal=True).shape == (24, 2, 128)
    assert_parity(lambda q, k, v: attention(q, k, v, segments, causal=True), (query, key, value))


def test_slices_of_one_fused_projection_are_accepted():
    fused = torch.randn(20, 3, 2, 8)
    for lengths in ([20], [10, 10], [4, 16]):
        segments = Segments(lengths)
        assert_parity(lambda x, s=segments: attention(x[:, 0], x[:, 1], x[:, 2], s, causal=False), (fused,))


def test_the_plan_is_made_once_for_all_layers():
    segments = Segments([4, 9])
    calls = []
    original = segments.derived

    def counting(key, make):
        return original(key, lambda: (calls.append(key), make())[1])

    segments.derived = counting
    x = torch.randn(13, 1, 4)
    for _ in range(3):
        attention(x, x, x, segments, causal=False)
    assert len(calls) == len(set(calls))


@pytest.mark.parametrize(
    ("segments", "window"),
    [(Segments([5, 0, 43]), None), (Segments([8, 40]), (3, -1)), (Segments([8, 40], [10, 50]), None)],
)
def test_the_variable_length_kernel_is_called_as_its_schema_wants(segments, window):
    """Fake CUDA tensors: no values, but the real schema and shapes of what runs on a GPU."""
    with FakeTensorMode():
        options = {"dtype": torch.bfloat16, "device": "cuda", "requires_grad": True}
        query = torch.empty(segments.total, 4, 64, **options)
        key = torch.empty(segments.key_total, 2, 64, **options)
        output, sums = attention(query, key, key, segments, causal=True, window=window, return_logsumexp=True)
        plain = attention(query, key, key, segments, causal=False, window=window)
    assert (output.shape, output.dtype, output.device.type) == (query.shape, torch.bfloat16, "cuda")
    assert (sums.shape, sums.dtype, sums.requires_grad) == ((segments.total, 4), torch.float32, False)
    assert "varlen" in output.grad_fn.name()
    assert "varlen" in plain.grad_fn.name()


def varlen_by_hand(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux, scale, window_size, enable_gqa):
    """What the variable-length kernel computes, one segment at a time; refuses the shapes that the kernel refuses."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
    assert query.shape[-1] % 8 == 0
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert window_size == (-1, 0)
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    group, outputs = query.shape[1] // key.shape[1], []
    for first, last in pairwise(cu_seq_q.tolist()):
        q, k, v = (x[first:last].transpose(0, 1) for x in (query, key, value))
        logits = (q @ k.repeat_interleave(group, 0).transpose(1, 2)).float() * scale
        logits = logits.masked_fill(torch.ones(logits.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
        outputs.append((logits.softmax(-1).to(v.dtype) @ v.repeat_interleave(group, 0)).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("widths", [(192, 128), (16, 16), (8, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_values_give_the_attention_of_the_variable_length_kernel(monkeypatch, widths, dtype):
    monkeypatch.setattr(attention_module, "_varlen_fits", lambda query, segments: True)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_by_hand)
    segments = Segments([9, 1, 14])
    query, key, value = (
        torch.randn(24, heads, width).to(dtype) for heads, width in ((4, widths[0]), (2, widths[0]), (2, widths[1]))
    )
    assert attention(query, key, value, segments, causal=True).shape == (24, 4, widths[1])
    assert_parity(lambda q, k, v: attention(q, k, v, segments, causal=True), (query, key, value))


def test_latent_attention_on_cuda_calls_the_variable_length_kernel_with_padded_values():
    """The shapes of DeepSeek-V3 on fake CUDA tensors, whose schema and shape rules are the real ones."""
    with FakeTensorMode():
        options = {"dtype": torch.bfloat16, "device": "cuda", "requires_grad": True}
        query, key = torch.empty(24, 4, 192, **options), torch.empty(24, 4, 192, **options)
        output = attention(query, key, torch.empty(24, 4, 128, **options), Segments([9, 1, 14]), causal=True)
    assert (output.shape, output.dtype) == ((24, 4, 128), torch.bfloat16)
    assert "Slice" in output.grad_fn.name()
    assert "varlen" in output.grad_fn.next_functions[0][0].name()


def test_layers_with_other_flags_share_the_segments_of_a_pack():
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 24, 2, 8, generator=generator)
    segments = Segments([10, 9, 5])
    for flags in [dict(causal=causal, window=window) for window in (None, (3, 2), (1, -1)) for causal in (True, False)]:
        with use_backend("reference"):
            expected = attention(query, key, value, segments, **flags)
        with use_backend("torch"):
            found = attention(query, key, value, segments, **flags)
        assert_close(found, expected, dtype=torch.float32, name=str(flags))
