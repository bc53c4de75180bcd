# SPDX-License-Identifier: Apache-2.0
"""Rotary operators against complex multiplication, their layouts, and what they refuse."""

import pytest
import torch

from mindvl_ops.testing.fake_npu import RefusedError

BF16 = torch.bfloat16


def _random(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _tables(angles, mode):
    """Full-width cosine and sine of `[..., D/2]` angles."""
    widen = (lambda x: x.repeat_interleave(2, -1)) if mode == "interleave" else (lambda x: torch.cat((x, x), -1))
    return widen(angles.cos()), widen(angles.sin())


def _complex(x, angles, mode):
    """Every pair as a complex number times e^(i angle)."""
    x = x.double()
    pairs = x.unflatten(-1, (-1, 2)) if mode == "interleave" else torch.stack(x.chunk(2, -1), -1)
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    )
    return turned.flatten(-2) if mode == "interleave" else torch.cat((turned[..., 0], turned[..., 1]), -1)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul_turns_pairs(fake_npu, mode):
    x, angles = _random(0, 7, 3, 8), _random(1, 7, 1, 4).double()
    cos, sin = (table.float() for table in _tables(angles, mode))
    y = fake_npu.torch_npu.npu_rotary_mul(x, cos, sin, mode)
    torch.testing.assert_close(y.double(), _complex(x, angles.expand(7, 3, 4), mode), rtol=1e-5, atol=1e-6)


def test_tables_are_cast_to_the_type_of_x_first(fake_npu):
    x = _random(0, 7, 3, 8, dtype=BF16)
    cos, sin = _tables(_random(1, 7, 1, 4), "half")
    npu = fake_npu.torch_npu
    y = npu.npu_rotary_mul(x, cos, sin)
    assert torch.equal(y, npu.npu_rotary_mul(x, cos.to(BF16), sin.to(BF16)))
    assert not torch.equal(y, npu.npu_rotary_mul(x.float(), cos, sin).to(BF16))
    assert torch.equal(y, npu.npu_rotary_mul(x.float(), cos.to(BF16).float(), sin.to(BF16).float()).to(BF16))


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_gradients_agree_between_formula_node_and_operator(fake_npu, mode):
    x = _random(0, 5, 3, 8).requires_grad_()
    cos, sin = (table.requires_grad_() for table in _tables(_random(1, 5, 1, 4), mode))
    dy, npu = _random(2, 5, 3, 8), fake_npu.torch_npu
    through_node = torch.autograd.grad(npu.npu_rotary_mul(x, cos, sin, mode), (x, cos, sin), dy)
    matrix = torch.zeros(8, 8)  # the turn as a matrix, written down pair by pair
    for k in range(4):
        a, b = (2 * k, 2 * k + 1) if mode == "interleave" else (k, k + 4)
        matrix[b, a], matrix[a, b] = -1.0, 1.0
    expected = torch.autograd.grad(x * cos + (x @ matrix) * sin, (x, cos, sin), dy)
    by_operator = npu.npu_rotary_mul_backward(dy, x.detach(), cos.detach(), sin.detach(), mode)
    for wanted, one, two in zip(expected, through_node, by_operator, strict=True):
        torch.testing.assert_close(one, wanted)
        torch.testing.assert_close(two, wanted)
    with torch.no_grad():
        torch.testing.assert_close(npu.npu_rotary_mul(x, cos, sin, mode, matrix), npu.npu_rotary_mul(x, cos, sin, mode))


ALLOWED = [  # x, table, mode: the table of layouts
    ((2, 3, 5, 8), (1, 1, 5, 8), "half"),
    ((2, 3, 5, 8), (2, 1, 5, 8), "half"),
    ((2, 3, 5, 8), (2, 3, 5, 8), "half"),
    ((2, 5, 3, 8), (1, 5, 1, 8), "half"),
    ((2, 5, 3, 8), (2, 5, 1, 8), "half"),
    ((5, 2, 3, 8), (5, 1, 1, 8), "half"),
    ((5, 3, 8), (5, 1, 8), "half"),
    ((5, 3, 8), (5, 3, 8), "half"),
    ((2, 3, 5, 8), (1, 1, 5, 8), "interleave"),
    ((2, 5, 3, 8), (1, 5, 1, 8), "interleave"),
    ((5, 2, 3, 8), (5, 1, 1, 8), "interleave"),
    ((5, 3, 8), (5, 1, 8), "interleave"),
]
REFUSED = [
    ((2, 3, 5, 8), (2, 1, 5, 8), "interleave", "fits no layout"),
    ((2, 3, 5, 8), (2, 3, 5, 8), "interleave", "fits no layout"),
    ((2, 3, 5, 8), (1, 1, 1, 8), "half", "fits no layout"),
    ((5, 3, 8), (1, 1, 8), "half", "fits no layout"),
    ((5, 3, 8), (5, 8), "half", "lacks the rank or D"),
    ((5, 3, 8), (5, 1, 4), "half", "lacks the rank or D"),
    ((5, 8), (5, 8), "half", r"input has rank 2, must be 3 \(TND\) or 4"),
    ((5, 3, 7), (5, 1, 7), "half", "D = 7 must be even"),
    ((5, 3, 896), (5, 1, 896), "half", "D = 896 must be even and below 896"),
    ((5, 3, 8), (5, 1, 8), "interleaved", "is neither 'half' nor 'interleave'"),
    ((2, 1000, 8), (2, 1, 8), "half", "B and N must be below 1000"),
    ((2, 1000, 8), (2, 1, 8), "interleave", r"B\*N must be below 1000"),
]


@pytest.mark.parametrize(("shape", "table", "mode"), ALLOWED)
def test_allowed_tables_pass(fake_npu, shape, table, mode):
    assert (
        fake_npu.torch_npu.npu_rotary_mul(torch.ones(shape), torch.ones(table), torch.ones(table), mode).shape == shape
    )


@pytest.mark.parametrize(("shape", "table", "mode", "words"), REFUSED)
def test_other_tables_are_refused(fake_npu, shape, table, mode, words):
    with pytest.raises(RefusedError, match=words):
        fake_npu.torch_npu.npu_rotary_mul(torch.ones(shape), torch.ones(table), torch.ones(table), mode)


def test_more_refusals_of_rotary_mul(fake_npu):
    npu, x, one = fake_npu.torch_npu, torch.ones(5, 3, 8), torch.ones(5, 1, 8)
    with pytest.raises(RefusedError, match=r"r1 .* and r2 .* differ in shape"):
        npu.npu_rotary_mul(x, one, torch.ones(5, 3, 8))
    with pytest.raises(RefusedError, match="input is torch"):
        npu.npu_rotary_mul(x.double(), one, one)
    with pytest.raises(RefusedError, match="there is no backward"):
        npu.npu_rotary_mul(x.clone().requires_grad_(), one, one, "half", torch.eye(8))
    with pytest.raises(RefusedError, match=r"must lie in \[-1, 1\], largest is 2"):
        npu.npu_rotary_mul(x, 2 * one, one)
    with fake_npu.relaxed(rotary_range=False):
        npu.npu_rotary_mul(x, 2 * one, one)
    learned = torch.ones(40, 1, 5, 8, requires_grad=True)
    with pytest.raises(RefusedError, match=r"B\*N must not pass 1024"):
        npu.npu_rotary_mul(torch.ones(40, 30, 5, 8), learned, learned)


def test_tables_without_gradient_get_none(fake_npu):
    x, one = torch.ones(5, 3, 8, requires_grad=True), torch.ones(5, 1, 8)
    fake_npu.torch_npu.npu_rotary_mul(x, one, one).sum().backward()
    assert x.grad is not None
    assert one.grad is None


def test_apply_rotary_pos_emb_turns_in_place(fake_npu):
    query, key = _random(0, 2, 5, 3, 64), _random(1, 2, 5, 1, 64)
    cos, sin = _tables(_random(2, 2, 5, 1, 32), "half")
    npu = fake_npu.torch_npu
    expected = [npu.npu_rotary_mul(x, cos, sin) for x in (query, key)]
    outputs = npu.npu_apply_rotary_pos_emb(query, key, cos, sin)
    for output, given, wanted in zip(outputs, (query, key), expected, strict=True):
        torch.testing.assert_close(output, wanted)
        torch.testing.assert_close(given, wanted)


APPLY = [
    ({"layout": "BNSD"}, "layout 'BNSD' is neither"),
    ({"rotary_mode": "interleave"}, "has half alone"),
    ({"key": torch.ones(2, 5, 1, 64, dtype=BF16)}, "must have one type"),
    ({"key": torch.ones(2, 4, 1, 64)}, "leading axes differ"),
    ({"key": torch.ones(2, 5, 64)}, "key has rank 3, layout is BSND"),
    ({"query": torch.ones(2, 5, 0, 64)}, "query is empty"),
    ({"query": torch.ones(2, 5, 3, 96)}, "D must be 64 or 128 everywhere"),
    ({"cos": torch.ones(2, 5, 3, 64)}, "must have N = 1"),
    ({"query": torch.ones(2, 5, 3, 64).double()}, "query is torch.float64"),
]


@pytest.mark.parametrize(("change", "words"), APPLY)
def test_a_broken_rule_of_apply_rotary_is_named(fake_npu, change, words):
    one = torch.ones(2, 5, 1, 64)
    call = {"query": torch.ones(2, 5, 3, 64), "key": one, "cos": one, "sin": one}
    with pytest.raises(RefusedError, match=words):
        fake_npu.torch_npu.npu_apply_rotary_pos_emb(**{**call, **change})


def _mrope_call(sections=(4, 2, 2)):
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 2, 4, 1, 3], [4, 3, 2, 1, 0]])
    angles = _random(3, 9, 8)
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    return {
        "positions": positions if sections else positions[0],
        "query": _random(0, 5, 2 * 24),
        "key": _random(1, 5, 24),
        "cos_sin_cache": cache,
        "head_size": 24,
        "mrope_section": list(sections) if sections else None,
    }, angles


@pytest.mark.parametrize(
    ("cache_mode", "sections", "axes"),
    [
        ("default", (4, 2, 2), [0, 0, 0, 0, 1, 1, 2, 2]),
        ("interleave", (4, 2, 2), [0, 1, 2, 0, 1, 2, 0, 0]),
        ("default", None, [0] * 8),
    ],
)
@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_mrope_takes_each_pair_from_its_axis_and_leaves_the_rest(fake_npu, cache_mode, sections, axes, mode):
    call, angles = _mrope_call(sections)
    outputs = fake_npu.torch_npu.npu_mrope(**call, rotary_mode=mode, cache_mode=cache_mode)
    positions = call["positions"].reshape(-1, 5)
    table = torch.stack([angles[positions[axis], pair] for pair, axis in enumerate(axes)], -1).double()  # [T, 8]
    for output, given in zip(outputs, (call["query"], call["key"]), strict=True):
        heads = given.view(5, -1, 24)
        turned = _complex(heads[..., :16], table[:, None].expand(5, heads.shape[1], 8), mode)
        torch.testing.assert_close(output.view_as(heads)[..., :16].double(), turned, rtol=1e-5, atol=1e-6)
        assert torch.equal(output.view_as(heads)[..., 16:], heads[..., 16:])


MROPE = [
    ({"rotary_mode": "quarter"}, "rotary_mode 'quarter'"),
    ({"cache_mode": "mixed"}, "cache_mode 'mixed' is unknown"),
    ({"positions": torch.zeros(3, 5)}, "positions are torch.float32"),
    ({"positions": torch.zeros(5, dtype=torch.int64)}, r"positions \[5\] must be \[3, 5\]"),
    ({"key": torch.zeros(5, 24, dtype=BF16)}, "must have one type"),
    ({"key": torch.zeros(5, 1, 24)}, "key has rank 3, must be 2"),
    ({"key": torch.zeros(5, 25)}, "no multiples of head_size 24"),
    ({"cos_sin_cache": torch.zeros(9, 8)}, "rotary size 8 must be a multiple of 16"),
    ({"mrope_section": [4, 2, 1]}, "must sum to 8"),
    ({"positions": torch.full((3, 5), 9)}, "outside the cache of 9 rows"),
]


@pytest.mark.parametrize(("change", "words"), MROPE)
def test_a_broken_rule_of_mrope_is_named(fake_npu, change, words):
    with pytest.raises(RefusedError, match=words):
        fake_npu.torch_npu.npu_mrope(**{**_mrope_call()[0], **change})
