# SPDX-License-Identifier: Apache-2.0
"""Values of fused attention against one pair of tokens at a time, in float64, for every layout and mode."""

import math

import pytest
import torch

from mindvl_ops.testing.fake_npu import RefusedError
from mindvl_ops.testing.fake_npu.attention_masks import compressed_mask

MANY = 2147483647


def _allowed(mode, i, j, rows, columns, pre, following, prefix, band):
    off = columns - rows
    if mode == 0:
        return i - pre <= j <= i + following
    if mode in (5, 6):
        return j <= i + off or j < prefix
    if mode == 4 or band:
        return i + off - pre <= j <= i + off + following
    return j <= i + off if mode in (3, 7) else j <= i


def _slow(query, key, value, scale, keep, pse=None, sink=None):
    """`[N, S, D]` of one sequence, pair by pair; returns output, maximum and sum."""
    heads, rows, _ = query.shape
    out = torch.zeros(heads, rows, value.shape[-1], dtype=torch.float64)
    top, total = torch.zeros(heads, rows), torch.zeros(heads, rows)
    for n in range(heads):
        kv = n // (heads // len(key))
        for i in range(rows):
            logits = {}
            for j in range(key.shape[1]):
                if keep(i, j):
                    score = float(query[n, i] @ key[kv, j]) + (0.0 if pse is None else float(pse[n, i, j]))
                    logits[j] = scale * score
            extra = [] if sink is None else [float(sink[n])]
            m = max([*logits.values(), *extra])
            weights = {j: math.exp(logit - m) for j, logit in logits.items()}
            s = sum(weights.values()) + sum(math.exp(each - m) for each in extra)
            top[n, i], total[n, i] = m, s
            for j, weight in weights.items():
                out[n, i] += weight / s * value[kv, j]
    return out, top, total


def _random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _packed_case(lengths, kv_lengths, value_size=6):
    query, key = _random(0, sum(lengths), 4, 8), _random(1, sum(kv_lengths), 2, 8)
    return query, key, _random(2, sum(kv_lengths), 2, value_size)


@pytest.mark.parametrize(
    ("mode", "lengths", "kv_lengths", "pre", "following", "prefix"),
    [
        (0, (3, 0, 5), (3, 0, 5), MANY, MANY, None),
        (2, (3, 1, 5), (3, 1, 5), MANY, MANY, None),
        (3, (2, 4), (5, 4), MANY, MANY, None),
        (4, (3, 4), (4, 6), 2, 1, None),
        (6, (3, 4), (5, 4), MANY, MANY, (4, 2)),
        (7, (3, 5), (4, 5), 5, 0, None),
        (8, (3, 5), (4, 5), 5, 0, None),
    ],
)
def test_packed_attention_keeps_what_its_mode_keeps(fake_npu, mode, lengths, kv_lengths, pre, following, prefix):
    query, key, value = _packed_case(lengths, kv_lengths)
    mask = None if mode == 0 else compressed_mask(mode)
    ends = [[sum(each[: i + 1]) for i in range(len(each))] for each in (lengths, kv_lengths)]
    out, top, total, empty, *_, numels = fake_npu.torch_npu.npu_fusion_attention(
        query.float(), key.float(), value.float(), 4, "TND", atten_mask=mask, scale=0.3, sparse_mode=mode,
        pre_tockens=pre, next_tockens=following, actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1], prefix=prefix,
        softmax_layout="TND",
    )  # fmt: skip
    parts = zip(query.split(list(lengths)), key.split(list(kv_lengths)), value.split(list(kv_lengths)), strict=True)
    expected = []
    for index, (q, k, v) in enumerate(parts):
        band = (mode == 7 and index == len(lengths) - 1) or (mode == 8 and index == 0)
        limit = None if prefix is None else prefix[index]
        keep = lambda i, j, q=q, k=k, band=band, limit=limit: _allowed(  # noqa: E731
            mode, i, j, len(q), len(k), pre, following, limit, band
        )
        expected.append(_slow(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), 0.3, keep))
    for index, actual in enumerate((out, top[..., 0], total[..., 0])):
        wanted = torch.cat([each[index].transpose(0, 1) for each in expected])
        torch.testing.assert_close(actual, wanted.float(), rtol=1e-4, atol=1e-5)
    assert numels == 4 * sum(a * b for a, b in zip(lengths, kv_lengths, strict=True))
    assert empty.shape == (0,)
    assert top.shape == total.shape == (sum(lengths), 4, 8)
    assert torch.equal(top, top[..., :1].expand_as(top))


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
@pytest.mark.parametrize("extra", ["nothing", "pse", "sink", "mask"])
def test_dense_layouts_agree_with_pairs(fake_npu, layout, extra):
    query, key, value = _random(0, 2, 4, 3, 8), _random(1, 2, 2, 5, 8), _random(2, 2, 2, 5, 6)
    pse, sink = _random(3, 2, 4, 3, 5), _random(4, 4)
    mask = torch.zeros(2, 1, 3, 5, dtype=torch.bool)
    mask[1, 0, :, 0] = True
    given = {"nothing": {}, "pse": {"pse": pse.float()}, "sink": {"sink": sink.float()}, "mask": {"atten_mask": mask}}

    def laid_out(x):
        x = x.float()
        if layout == "BNSD":
            return x
        x = x.transpose(1, 2)
        if layout == "BSND":
            return x
        x = x.flatten(2)
        return x.transpose(0, 1) if layout == "SBH" else x

    out, top, total, *_ = fake_npu.torch_npu.npu_fusion_attention(
        laid_out(query), laid_out(key), laid_out(value), 4, layout, scale=0.3, **given[extra]
    )
    slow = [
        _slow(
            *(x[b] for x in (query, key, value)), 0.3,
            (lambda i, j, b=b: not mask[b, 0, i, j]) if extra == "mask" else (lambda i, j: True),
            pse[b] if extra == "pse" else None, sink if extra == "sink" else None,
        )
        for b in range(2)
    ]  # fmt: skip
    wanted = [torch.stack([each[index] for each in slow]) for index in range(3)]
    torch.testing.assert_close(out, laid_out(wanted[0]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(top[..., 7], wanted[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(total[..., 3], wanted[2], rtol=1e-4, atol=1e-5)


def _plain(query, key, value, lengths, scale):
    """Causal attention per segment in plain PyTorch, differentiable."""
    outs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        k, v = (x.repeat_interleave(2, dim=1).transpose(0, 1) for x in (k, v))
        logits = q.transpose(0, 1) @ k.transpose(1, 2) * scale
        logits = logits + torch.full(logits.shape[-2:], float("-inf")).triu(1)
        outs.append((logits.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


def test_gradients_equal_those_of_the_formula_and_of_the_gradient_operator(fake_npu):
    lengths = [3, 5]
    leaves = [x.float().requires_grad_() for x in _packed_case(lengths, lengths)]
    dy = _random(9, 8, 4, 6).float()
    expected = torch.autograd.grad(_plain(*leaves, lengths, 0.3), leaves, dy)
    common = {"atten_mask": compressed_mask(3), "actual_seq_qlen": [3, 8], "actual_seq_kvlen": [3, 8], "sparse_mode": 3}
    npu = fake_npu.torch_npu
    out, top, total, *_ = npu.npu_fusion_attention(*leaves, 4, "TND", scale=0.3, **common)
    through_node = torch.autograd.grad(out, leaves, dy)
    assert out.grad_fn.name() == "NpuFusionAttentionBackward"
    saved = {"softmax_max": top, "softmax_sum": total, "attention_in": out}
    detached = [x.detach() for x in leaves]
    saved = {name: x.detach() for name, x in saved.items()}
    *by_operator, dpse, dsink = npu.npu_fusion_attention_grad(
        *detached, dy, 4, "TND", scale_value=0.3, **saved, **common
    )
    for wanted, one, two in zip(expected, through_node, by_operator, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(two, wanted, rtol=1e-4, atol=1e-5)
    assert dpse is None
    assert dsink.shape == (0,)


def test_gradients_of_pse_and_sink_agree_between_node_and_operator(fake_npu):
    npu = fake_npu.torch_npu
    leaves = [_random(i, 2, 2, 3, 8).float().requires_grad_() for i in range(3)]
    pse, sink = _random(5, 1, 2, 1, 3).float().requires_grad_(), _random(6, 2).float().requires_grad_()
    dy = _random(7, 2, 2, 3, 8).float()
    out, top, total, *_ = npu.npu_fusion_attention(*leaves, 2, "BNSD", pse=pse, sink=sink, scale=0.5)
    through_node = torch.autograd.grad(out, [*leaves, pse, sink], dy)
    values = [x.detach() for x in leaves]
    by_operator = npu.npu_fusion_attention_grad(
        *values, dy, 2, "BNSD", pse=pse.detach(), sink=sink.detach(), softmax_max=top.detach(),
        softmax_sum=total.detach(), attention_in=out.detach(), scale_value=0.5,
    )  # fmt: skip
    for one, two in zip(through_node, by_operator, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_packed_statistics_lie_head_by_head_in_memory_unless_asked_otherwise(fake_npu):
    query, key, value = (x.float() for x in _packed_case((3, 5), (3, 5)))
    ends = {"actual_seq_qlen": [3, 8], "actual_seq_kvlen": [3, 8]}
    npu = fake_npu.torch_npu
    tokens_first = npu.npu_fusion_attention(query, key, value, 4, "TND", softmax_layout="TND", **ends)[1]
    heads_first = npu.npu_fusion_attention(query, key, value, 4, "TND", **ends)[1]
    assert not torch.equal(tokens_first, heads_first)
    assert torch.equal(heads_first.reshape(4, 8, 8), tokens_first.transpose(0, 1))


def test_trailing_zeros_drop_sequences_and_leave_their_rows_empty(fake_npu):
    query, key, value = (x.float() for x in _packed_case((3, 5), (3, 5)))
    out, *_ = fake_npu.torch_npu.npu_fusion_attention(
        query, key, value, 4, "TND", actual_seq_qlen=[3, 0], actual_seq_kvlen=[3, 0]
    )
    short, *_ = fake_npu.torch_npu.npu_fusion_attention(
        query[:3], key[:3], value[:3], 4, "TND", actual_seq_qlen=[3], actual_seq_kvlen=[3]
    )
    assert torch.equal(out[:3], short)
    assert not out[3:].any()


def test_a_row_without_a_kept_place_is_zero_where_the_kernel_handles_it_and_a_mean_elsewhere(fake_npu):
    query, key, value = (_random(i, 1, 1, 2, 4).float() for i in range(3))
    mask = torch.tensor([[False, False], [True, True]])
    npu = fake_npu.torch_npu
    plain = npu.npu_fusion_attention(query, key, value, 1, "BNSD", atten_mask=mask)[0]
    handled = npu.npu_fusion_attention(query, key, value, 1, "BNSD", atten_mask=mask, inner_precise=2)[0]
    torch.testing.assert_close(plain[0, 0, 1], value[0, 0].mean(dim=0))
    assert not handled[0, 0, 1].any()
    assert torch.equal(plain[0, 0, 0], handled[0, 0, 0])


def test_mode_3_with_more_rows_than_columns_zeroes_the_first_rows(fake_npu):
    query, key, value = _random(0, 1, 1, 4, 4), _random(1, 1, 1, 2, 4), _random(2, 1, 1, 2, 4)
    out = fake_npu.torch_npu.npu_fusion_attention(
        query.float(), key.float(), value.float(), 1, "BNSD", atten_mask=compressed_mask(3), sparse_mode=3
    )[0]
    assert not out[0, 0, :2].any()
    torch.testing.assert_close(out[0, 0, 2], value[0, 0, 0].float())


def test_the_scale_is_one_unless_given(fake_npu):
    query, key, value = (_random(i, 1, 1, 3, 4).float() for i in range(3))
    npu = fake_npu.torch_npu
    plain, one = (npu.npu_fusion_attention(query, key, value, 1, "BNSD", **more)[0] for more in ({}, {"scale": 1.0}))
    assert torch.equal(plain, one)


def test_pse_of_type_0_is_added_after_the_scale(fake_npu):
    query, key, value, pse = (_random(i, 1, 1, 3, 3).float() for i in range(4))
    npu = fake_npu.torch_npu
    after = npu.npu_fusion_attention_v2(query, key, value, 1, "BNSD", pse=pse, pse_type=0, scale=0.5)[0]
    before = npu.npu_fusion_attention(query, key, value, 1, "BNSD", pse=2 * pse, scale=0.5)[0]
    torch.testing.assert_close(after, before)


def test_separate_rotary_parts_of_version_2_are_columns_of_query_and_key(fake_npu):
    query, key, value = _random(0, 1, 2, 3, 8), _random(1, 1, 2, 3, 8), _random(2, 1, 2, 3, 4)
    leaves = [query[..., :6], key[..., :6], query[..., 6:], key[..., 6:]]
    q, k, qr, kr = (x.float().requires_grad_() for x in leaves)
    npu = fake_npu.torch_npu
    out = npu.npu_fusion_attention_v2(q, k, value.float(), 2, "BNSD", query_rope=qr, key_rope=kr, scale=0.4)[0]
    whole = npu.npu_fusion_attention(query.float(), key.float(), value.float(), 2, "BNSD", scale=0.4)[0]
    assert torch.equal(out, whole)
    assert all(x is not None for x in torch.autograd.grad(out.sum(), [q, k, qr, kr]))


def test_version_3_agrees_with_version_1_and_returns_tensors(fake_npu):
    query, key, value = (x.float() for x in _packed_case((3, 5), (3, 5)))
    npu = fake_npu.torch_npu
    ends = torch.tensor([3, 8])
    three = npu.npu_fusion_attention_v3(query, key, value, 4, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends)
    one = npu.npu_fusion_attention(query, key, value, 4, "TND", actual_seq_qlen=[3, 8], actual_seq_kvlen=[3, 8])
    assert torch.equal(three[0], one[0])
    assert [tuple(x.shape) for x in three[4:]] == [(1,), (1,)]


def test_dropout_is_drawn_again_the_same_in_the_backward(fake_npu):
    query, key = (_random(i, 1, 1, 6, 4).float() for i in range(2))
    value = torch.eye(6)[None, None, :, :4].contiguous().requires_grad_()
    out = fake_npu.torch_npu.npu_fusion_attention(query, key, value, 1, "BNSD", keep_prob=0.5, seed=3)[0]
    weights = out[0, 0].detach()  # value is the identity: rows of the output are the dropped weights
    assert (weights == 0).any()
    (grad,) = torch.autograd.grad(out.sum(), value)
    torch.testing.assert_close(grad[0, 0, :4].sum(dim=1) / 4, weights.sum(dim=0))


def test_a_gradient_into_the_statistics_is_refused_because_it_would_be_lost(fake_npu):
    leaves = [_random(i, 1, 1, 3, 4).float().requires_grad_() for i in range(3)]
    out, top, *_ = fake_npu.torch_npu.npu_fusion_attention(*leaves, 1, "BNSD")
    with pytest.raises(RefusedError, match=r"a gradient reaches output \[1\]"):
        (out.sum() + top.sum()).backward(retain_graph=True)
    with fake_npu.relaxed(unused_outputs=False):
        (out.sum() + top.sum()).backward()
    assert leaves[0].grad is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_is_rounded_once_at_the_end(fake_npu, dtype):
    query, key, value = (_random(i, 1, 2, 5, 8).to(dtype) for i in range(3))
    npu = fake_npu.torch_npu
    narrow = npu.npu_fusion_attention(query, key, value, 2, "BNSD", scale=0.4)
    wide = npu.npu_fusion_attention(query.float(), key.float(), value.float(), 2, "BNSD", scale=0.4)
    assert torch.equal(narrow[0], wide[0].to(dtype))
    assert narrow[1].dtype == narrow[2].dtype == torch.float32
