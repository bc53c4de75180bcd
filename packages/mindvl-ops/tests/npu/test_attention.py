# SPDX-License-Identifier: Apache-2.0
"""Attention on the simulated NPU: equal to the reference for every kind of packed sequence, one sync a step, refusals."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindvl_ops import OpsError, Segments, attention, use_backend
from mindvl_ops.testing import assert_close, assert_parity

pytestmark = pytest.mark.slow

layouts = st.one_of(
    st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any),
    st.integers(1, 9).map(lambda count: [1] * count),
    st.sampled_from([[90], [1, 90, 1], [5, 0, 0], [0, 7]]),
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def _qkv(segments, heads=(4, 2), widths=(8, 8), dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(total, count, width, generator=generator).to(dtype)
        for total, count, width in (
            (segments.total, heads[0], widths[0]),
            (segments.key_total, heads[1], widths[0]),
            (segments.key_total, heads[1], widths[1]),
        )
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=layouts,
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    widths=st.sampled_from([(8, 8), (12, 8), (4, 8), (3, 3)]),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.tuples(st.integers(-1, 5), st.integers(-1, 5))),
    dtype=dtypes,
    seed=st.integers(0, 100),
)
def test_packed_sequences_equal_the_reference(fake_npu, lengths, heads, widths, causal, window, dtype, seed):
    segments = Segments(lengths)
    assert_parity(
        lambda q, k, v: attention(q, k, v, segments, causal=causal, window=window),
        _qkv(segments, heads, widths, dtype, seed),
        backend="npu",
    )


CUT_ROWS = {
    3: Segments([4, 9, 1], [6, 9, 3]),
    7: Segments([4, 9, 5], [6, 9, 9], offsets=[2, 0, 1]),
    8: Segments([4, 9, 5], [9, 9, 9], offsets=[3, 0, 0]),
}
# The first or the last segment has keys, but no queries: the band is that of the first or last with queries.
CUT_ROWS_WITHOUT_QUERIES_AT_AN_END = [
    (7, Segments([4, 9, 5, 0], [6, 9, 9, 3], offsets=[2, 0, 1, 0])),
    (7, Segments([0, 4, 5, 0], [2, 6, 9, 3], offsets=[0, 2, 1, 3])),
    (8, Segments([0, 4, 9, 5], [3, 9, 9, 9], offsets=[3, 3, 0, 0])),
    (8, Segments([0, 4, 0, 5, 0], [3, 9, 2, 9, 4], offsets=[1, 3, 0, 0, 2])),
    (3, Segments([0, 4, 0], [3, 9, 4])),
]


@pytest.mark.parametrize(("mode", "segments"), [*CUT_ROWS.items(), *CUT_ROWS_WITHOUT_QUERIES_AT_AN_END])
def test_split_packs_equal_the_reference(fake_npu, mode, segments):
    assert_parity(lambda q, k, v: attention(q, k, v, segments, causal=True), _qkv(segments), backend="npu")
    assert {call.arguments["sparse_mode"] for call in fake_npu.calls} == {mode}


@pytest.mark.parametrize("backend", ["torch", "npu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("segments", [Segments([5, 1, 0, 12]), Segments([6, 6]), *CUT_ROWS.values()], ids=str)
def test_statistics_equal_the_reference_and_carry_no_gradient(fake_npu, backend, dtype, segments):
    qkv = _qkv(segments, dtype=dtype)
    with use_backend("reference"):
        _, expected = attention(*(x.double() for x in qkv), segments, causal=True, return_logsumexp=True)
    with use_backend(backend):
        output, sums = attention(*(x.requires_grad_() for x in qkv), segments, causal=True, return_logsumexp=True)
    assert (sums.dtype, sums.requires_grad, output.requires_grad) == (torch.float32, False, True)
    assert_close(sums, expected, dtype=dtype, name="logsumexp")


def test_pieces_of_the_keys_can_be_joined_by_their_statistics(fake_npu):
    """What context parallelism does with them."""
    whole, half = Segments([3], [8]), Segments([3], [4])
    query, key, value = _qkv(whole)
    with use_backend("npu"):
        expected = attention(query, key, value, whole, causal=False)
        pieces = [
            attention(query, key[i : i + 4], value[i : i + 4], half, causal=False, return_logsumexp=True)
            for i in (0, 4)
        ]
    weights = torch.stack([sums for _, sums in pieces]).softmax(dim=0)
    joined = sum(weight[..., None] * output for weight, (output, _) in zip(weights, pieces, strict=True))
    torch.testing.assert_close(joined, expected)


def test_the_host_waits_once_for_a_step_of_many_layers(fake_npu):
    cu_seqlens = torch.tensor([0, 5, 5, 30, 48], dtype=torch.int32)
    query, key, value = (x.requires_grad_() for x in _qkv(Segments([48])))
    with use_backend("npu"):
        segments = Segments.from_cu_seqlens(cu_seqlens)
        for layer in range(12):
            query.grad = None
            hidden = attention(query, key, value, segments, causal=layer % 2 == 0)
            hidden.sum().backward()
    assert fake_npu.syncs == ["tolist"]
    ends = [call.arguments["actual_seq_qlen"] for call in fake_npu.calls if call.op.startswith("npu_fusion_attention")]
    assert ends == [[5, 30, 48]] * 12


def test_vision_and_language_use_one_call_and_one_mask(fake_npu):
    segments = Segments([16, 16])
    qkv = _qkv(segments)
    with use_backend("npu"):
        attention(*qkv, segments, causal=False)
        attention(*qkv, segments, causal=True)
    vision, language = (call.arguments for call in fake_npu.calls)
    assert (vision["atten_mask"], vision["sparse_mode"]) == (None, 0)
    assert (language["atten_mask"].shape, language["sparse_mode"]) == ((2048, 2048), 2)
    assert {vision["input_layout"], language["input_layout"]} == {"TND"}


def test_slices_of_one_fused_projection_are_accepted(fake_npu):
    segments = Segments([7, 3])
    assert_parity(
        lambda x: attention(x[:, 0], x[:, 1], x[:, 2], segments, causal=True),
        (torch.randn(10, 3, 2, 8),),
        backend="npu",
    )


def test_more_segments_than_one_call_takes_become_several_calls(fake_npu):
    segments = Segments([2, 1, 3] * 683 + [2], [3, 1, 3] * 683 + [2])  # 2,050 segments, the first queries cut off
    qkv = _qkv(segments, heads=(1, 1), widths=(2, 2))
    with use_backend("npu"):
        output, sums = attention(*qkv, segments, causal=True, return_logsumexp=True)
    with use_backend("torch"):
        expected, expected_sums = attention(*qkv, segments, causal=True, return_logsumexp=True)
    torch.testing.assert_close((output, sums), (expected, expected_sums))
    lengths = [len(call.arguments["actual_seq_qlen"]) for call in fake_npu.calls]
    assert (len(lengths), max(lengths), sum(lengths)) == (2, 2048, 2050)


def test_gradients_come_back_from_several_calls(fake_npu, monkeypatch):
    monkeypatch.setattr("mindvl_ops.npu.masks.MAX_SEGMENTS", 2)
    segments = Segments([4, 0, 5, 3, 0], [6, 2, 9, 3, 1], offsets=[2, 0, 1, 0, 0])
    assert_parity(lambda q, k, v: attention(q, k, v, segments, causal=True), _qkv(segments), backend="npu")


def test_an_empty_pack_never_reaches_the_kernel(fake_npu):
    with use_backend("npu"):
        assert attention(*_qkv(Segments([]), widths=(8, 4)), Segments([]), causal=True).shape == (0, 4, 4)
    assert not fake_npu.calls


@pytest.mark.parametrize(
    ("segments", "heads", "width", "dtype", "message"),
    [
        (Segments([4]), 1, 516, torch.float32, "head size 516 over 512"),
        (Segments([4]), 1, 8, torch.float64, "type torch.float64"),
        (Segments([1]), 257, 8, torch.float32, "257 heads over 256"),
        (Segments([3, 9]), 1, 1, torch.float32, "a segment of 9 tokens over 8"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_before_the_call(
    fake_npu, monkeypatch, segments, heads, width, dtype, message
):
    for module in ("attention", "masks"):
        monkeypatch.setattr(f"mindvl_ops.npu.{module}.MAX_TOKENS", 8)
    qkv = _qkv(segments, (heads, heads), (width, width), dtype)
    with use_backend("npu"), pytest.raises(OpsError, match=message):
        attention(*qkv, segments, causal=True)
    assert not fake_npu.calls
