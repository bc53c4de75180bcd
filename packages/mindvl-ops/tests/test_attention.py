# SPDX-License-Identifier: Apache-2.0
"""Packed attention: the reference against hand-made cases, and its contract."""

import pytest
import torch

from mindvl_ops import OpsError, Segments, attention, use_backend
from mindvl_ops.attention import attention_reference, blocked_mask


def _qkv(total, heads=2, kv_heads=2, width=4, value_width=4, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(total, heads, width, generator=generator).to(dtype),
        torch.randn(total, kv_heads, width, generator=generator).to(dtype),
        torch.randn(total, kv_heads, value_width, generator=generator).to(dtype),
    )


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_segment_of_one_token_returns_its_value(backend):
    query, key, value = _qkv(3)
    with use_backend(backend):
        output = attention(query, key, value, Segments([1, 1, 1]), causal=False)
    torch.testing.assert_close(output, value)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_zero_queries_average_what_they_may_see(backend):
    _, key, value = _qkv(4)
    with use_backend(backend):
        output = attention(torch.zeros_like(key), key, value, Segments([1, 3]), causal=True)
    expected = torch.stack([value[0], value[1], value[1:3].mean(0), value[1:4].mean(0)])
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_poisoned_neighbour_changes_nothing(backend, causal):
    lengths = [3, 7, 1, 30]
    query, key, value = (x.requires_grad_() for x in _qkv(sum(lengths)))
    poisoned = [x.detach().clone() for x in (query, key, value)]
    for x in poisoned:
        x[3:10] = float("nan")
        x.requires_grad_()
    clean = [*range(3), *range(10, 41)]
    with use_backend(backend):
        expected = attention(query, key, value, Segments(lengths), causal=causal)[clean]
        actual = attention(*poisoned, Segments(lengths), causal=causal)[clean]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    expected.sum().backward()
    actual.sum().backward()
    for x, y in zip((query, key, value), poisoned, strict=True):
        torch.testing.assert_close(y.grad[clean], x.grad[clean], rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_an_empty_pack_and_empty_segments_are_allowed(backend):
    query, key, value = _qkv(5)
    with use_backend(backend):
        assert attention(*_qkv(0, value_width=3), Segments([]), causal=False).shape == (0, 2, 3)
        with_empty = attention(query, key, value, Segments([0, 2, 0, 3]), causal=True)
        torch.testing.assert_close(with_empty, attention(query, key, value, Segments([2, 3]), causal=True))


def test_a_window_of_one_to_the_left_sees_two_tokens():
    expected = torch.tensor([[0, 1, 1], [0, 0, 1], [1, 0, 0]], dtype=torch.bool)
    assert torch.equal(blocked_mask(3, True, (1, -1), torch.device("cpu")), expected)
    assert not blocked_mask(3, False, (-1, -1), torch.device("cpu")).any()
    cut = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1]], dtype=torch.bool)
    assert torch.equal(blocked_mask(2, True, None, torch.device("cpu"), key_length=4, offset=1), cut)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_the_second_half_of_a_pack_attends_as_in_the_whole_pack(backend):
    query, key, value = _qkv(10)
    with use_backend(backend):
        whole, sums = attention(query, key, value, Segments([3, 7]), causal=True, return_logsumexp=True)
        rest = Segments([0, 4], [3, 7])
        part, part_sums = attention(query[6:], key, value, rest, causal=True, return_logsumexp=True)
    torch.testing.assert_close((part, part_sums), (whole[6:], sums[6:]))


def test_logsumexp_of_even_logits_is_the_log_of_what_is_seen():
    _, key, value = _qkv(4)
    with use_backend("reference"):
        _, sums = attention(torch.zeros_like(key), key, value, Segments([1, 3]), causal=True, return_logsumexp=True)
    torch.testing.assert_close(sums[:, 0], torch.tensor([1.0, 1.0, 2.0, 3.0]).log())


def test_reference_gradients_are_right_in_float64():
    inputs = [x.requires_grad_() for x in _qkv(6, heads=2, kv_heads=1, width=3, value_width=2, dtype=torch.float64)]
    segments = Segments([4, 2])
    for window in (None, (1, 1)):
        assert torch.autograd.gradcheck(
            lambda q, k, v, window=window: attention_reference(
                q, k, v, segments, causal=True, window=window, scale=0.5
            )[0],
            inputs,
        )


def test_wrong_calls_say_what_to_do():
    query, key, value = _qkv(4, heads=3)
    with pytest.raises(OpsError, match=r"4 tokens, segments add up to 5"):
        attention(query, key, value, Segments([5]), causal=True)
    with pytest.raises(OpsError, match=r"3 query heads over 2"):
        attention(query, key, value, Segments([4]), causal=True)
    with pytest.raises(OpsError, match=r"do not agree"):
        attention(query[:, :2], key, value[:3], Segments([4]), causal=True)
    with pytest.raises(OpsError, match=r"key has 4 tokens, segments add up to 5"):
        attention(key, key, value, Segments([4], [5]), causal=True)
    with pytest.raises(OpsError, match=r"2 queries more than keys"):
        attention(key, key[:2], value[:2], Segments([4], [2]), causal=True)
    with pytest.raises(OpsError, match=r"window \(-2, 0\)"):
        attention(key, key, value, Segments([4]), causal=True, window=(-2, 0))


@pytest.mark.parametrize("window", [8, (8,), (1, 2, 3), (1.0, 2), "88", (True, 0), (None, 1)])
def test_a_window_that_is_no_pair_of_integers_is_refused(window):
    query, key, value = _qkv(4)
    with pytest.raises(OpsError, match=r"attention: window .* is not \(left, right\)"):
        attention(query, key, value, Segments([4]), causal=True, window=window)


def test_tensors_of_different_types_or_without_heads_are_refused():
    query, key, value = _qkv(4)
    with pytest.raises(OpsError, match=r"query is torch.float32, key torch.bfloat16"):
        attention(query, key.bfloat16(), value.bfloat16(), Segments([4]), causal=True)
    with pytest.raises(OpsError, match=r"Use \[T, N, D\]"):
        attention(query, key[:, :0], value[:, :0], Segments([4]), causal=True)
    with pytest.raises(OpsError, match=r"Use \[T, N, D\]"):
        attention(query[0], key, value, Segments([4]), causal=True)


@pytest.mark.parametrize("backend", ["reference", "torch", "npu"])
@pytest.mark.parametrize("keys", [0, 3])
def test_no_queries_at_all_stay_in_the_graph(fake_npu, backend, keys):
    """A rank that has no token of a packed sequence must still take part in its backward pass."""
    query, key, value = torch.randn(0, 2, 4), torch.randn(keys, 2, 4), torch.randn(keys, 2, 3)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    with use_backend(backend):
        output, sums = attention(*inputs, Segments([0], [keys]), causal=False, return_logsumexp=True)
        assert attention(*inputs, Segments([0], [keys]), causal=True).requires_grad
    assert (output.shape, sums.shape, sums.requires_grad) == ((0, 2, 3), (0, 2), False)
    output.sum().backward()
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in inputs)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_window_may_be_a_list(backend):
    query = torch.randn(4, 1, 8)
    with use_backend(backend):
        pair, listed = (
            attention(query, query, query, Segments([4]), causal=True, window=window) for window in ((1, 0), [1, 0])
        )
    assert torch.equal(pair, listed)
