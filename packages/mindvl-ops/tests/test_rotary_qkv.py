# SPDX-License-Identifier: Apache-2.0
"""Heads from one projection: by hand, and equal to split, norm and rotation one after the other."""

import pytest
import torch

from mindvl_ops import HeadNorms, OpsError, rms_norm, rotary, rotary_qkv, use_backend
from mindvl_ops.rotary_qkv import rotary_qkv_reference


def test_two_query_heads_a_key_and_a_value_come_from_their_places():
    """One token at a quarter turn: (a, b) becomes (-b, a); values are not turned."""
    qkv = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]]])
    cos, sin = torch.zeros(1, 2), torch.ones(1, 2)
    query, key, value = rotary_qkv_reference(qkv, cos, sin)
    assert query.tolist() == [[[-2.0, 1.0], [-4.0, 3.0]]]
    assert key.tolist() == [[[-6.0, 5.0]]]
    assert value.tolist() == [[[7.0, 8.0]]]


def test_norms_of_queries_and_keys_have_their_own_weights_and_values_have_none():
    qkv = torch.tensor([[[3.0, 4.0, 6.0, 8.0, 5.0, 5.0]]])
    cos, sin = torch.ones(1, 2), torch.zeros(1, 2)
    norms = HeadNorms(torch.tensor([1.0, 2.0]), torch.tensor([5.0, 1.0]), 0.0)
    query, key, value = rotary_qkv_reference(qkv, cos, sin, norms)
    root = 12.5**0.5  # root mean square of (3, 4)
    torch.testing.assert_close(query, torch.tensor([[[3.0, 8.0]]]) / root)
    torch.testing.assert_close(key, torch.tensor([[[15.0, 4.0]]]) / root)
    assert value.tolist() == [[[5.0, 5.0]]]


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("has_norms", [False, True])
def test_it_equals_the_operators_one_after_the_other_bitwise(backend, has_norms):
    qkv, cos, sin = torch.randn(7, 2, 40).bfloat16(), torch.randn(7, 8), torch.randn(7, 8)
    weights = torch.randn(8).bfloat16(), torch.randn(8).bfloat16()
    with use_backend(backend):
        query, key, value = rotary_qkv(qkv, cos, sin, HeadNorms(*weights, 1e-6) if has_norms else None)
        heads = qkv.view(7, 2, 5, 8)  # three query heads, the key and the value of each group
        q, k = heads[:, :, :3].reshape(7, 6, 8), heads[:, :, 3]
        if has_norms:
            q, k = rms_norm(q, weights[0], 1e-6), rms_norm(k, weights[1], 1e-6)
        assert torch.equal(query, rotary(q, cos, sin))
        assert torch.equal(key, rotary(k, cos, sin))
    assert torch.equal(value, heads[:, :, 4])


def test_gradients_are_right_in_float64():
    qkv, weights = torch.randn(3, 2, 16).double(), torch.randn(2, 4).double()
    cos, sin = torch.randn(3, 4).double(), torch.randn(3, 4).double()

    def heads(qkv, weights):
        return rotary_qkv_reference(qkv, cos, sin, HeadNorms(*weights, 1e-5))

    assert torch.autograd.gradcheck(heads, (qkv.requires_grad_(), weights.requires_grad_()))


@pytest.mark.parametrize(
    ("qkv", "tables", "weights"),
    [((4, 2, 12), (3, 4), 4), ((4, 24), (4, 4), 4), ((4, 2, 13), (4, 4), 4), ((4, 2, 8), (4, 4), 4),
     ((4, 2, 9), (4, 3), 3), ((4, 2, 12), (4, 4), 3)],
)  # fmt: skip
def test_shapes_that_do_not_agree_are_refused(qkv, tables, weights):
    norms = HeadNorms(torch.ones(weights), torch.ones(weights), 1e-6)
    with pytest.raises(OpsError, match=r"rotary_qkv: .*(Give|must hold)"):
        rotary_qkv(torch.zeros(qkv), torch.zeros(tables), torch.zeros(tables), norms)
