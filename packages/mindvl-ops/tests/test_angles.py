# SPDX-License-Identifier: Apache-2.0
"""Rotary tables: one pair by hand, the axes of M-RoPE and of an image, and the relation to distances."""

import math

import pytest
import torch

from mindvl_ops import OpsError, mrope_tables, rotary, rotary_tables, vision_tables

pytestmark = pytest.mark.slow


def test_the_second_pair_of_four_turns_slower_by_the_root_of_the_base():
    cos, sin = rotary_tables(torch.tensor([0, 3]), 4, 100.0)
    angles = torch.tensor([[0.0, 0.0, 0.0, 0.0], [3.0, 0.3, 3.0, 0.3]])
    torch.testing.assert_close((cos, sin), (angles.cos(), angles.sin()))
    interleaved, _ = rotary_tables(torch.tensor([0, 3]), 4, 100.0, interleaved=True)
    torch.testing.assert_close(interleaved[1], torch.tensor([3.0, 3.0, 0.3, 0.3]).cos())


def test_text_positions_make_mrope_plain_rope():
    positions = torch.tensor([0, 1, 7, 4000])
    three = mrope_tables(positions.expand(3, -1), 16, 1e6, (2, 3, 3))
    torch.testing.assert_close(three, rotary_tables(positions, 16, 1e6), rtol=0, atol=0)


def test_each_section_of_mrope_follows_its_axis():
    still = torch.zeros(3, 1, dtype=torch.int64)
    for axis, pairs in enumerate(([0, 1], [2, 3, 4], [5, 6, 7])):
        moved = still.clone()
        moved[axis] = 5
        _, sin = mrope_tables(moved, 16, 10.0, (2, 3, 3))
        turned = sin[0, :8].ne(0).nonzero()[:, 0].tolist()
        assert turned == pairs
        assert torch.equal(sin[0, :8], sin[0, 8:])


def test_alternating_axes_take_turns_while_they_have_pairs_left_and_time_has_the_rest():
    still = torch.zeros(3, 1, dtype=torch.int64)
    for axis, pairs in enumerate(([0, 3, 6, 7], [1, 4], [2, 5])):
        moved = still.clone()
        moved[axis] = 5
        _, sin = mrope_tables(moved, 16, 10.0, (4, 2, 2), alternating=True)
        assert sin[0, :8].ne(0).nonzero()[:, 0].tolist() == pairs


def test_given_frequencies_replace_those_of_the_base():
    positions, frequencies = torch.tensor([0, 2]), torch.tensor([1.0, 0.25])
    angles = torch.tensor([[0.0] * 4, [2.0, 0.5, 2.0, 0.5]])
    expected = angles.cos(), angles.sin()
    torch.testing.assert_close(rotary_tables(positions, 4, 100.0, frequencies=frequencies), expected)
    three = mrope_tables(positions.expand(3, -1), 4, 100.0, (0, 1, 1), frequencies=frequencies)
    torch.testing.assert_close(three, expected)


def test_rows_and_columns_of_an_image_take_a_quarter_of_the_head_each():
    cos, sin = vision_tables(torch.tensor([[2, 0], [0, 3]]), 8, 10000.0)
    angles = torch.tensor([[2.0, 0.02, 0.0, 0.0] * 2, [0.0, 0.0, 3.0, 0.03] * 2])
    torch.testing.assert_close((cos, sin), (angles.cos(), angles.sin()))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_product_of_query_and_key_depends_on_the_distance_alone(interleaved):
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 8, generator=generator).expand(10, 1, 8) for _ in range(2))
    cos, sin = rotary_tables(torch.arange(10), 8, 100.0, interleaved)
    products = rotary(query, cos, sin, interleaved)[:, 0] @ rotary(key, cos, sin, interleaved)[:, 0].T
    for distance in range(10):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)


def test_large_positions_keep_their_angle():
    cos, _ = rotary_tables(torch.tensor([8191]), 2, 10000.0)
    assert math.isclose(cos[0, 0].item(), math.cos(8191), abs_tol=1e-6)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(OpsError, match=r"sections \(2, 3\) do not fit 3 axes"):
        mrope_tables(torch.zeros(3, 1), 16, 1e4, (2, 3))
    with pytest.raises(OpsError, match="width 6 is not a multiple of 4"):
        vision_tables(torch.zeros(1, 2), 6, 1e4)
    with pytest.raises(OpsError, match="width 5 is odd"):
        rotary_tables(torch.zeros(1), 5, 1e4)


def test_mrope_is_that_of_transformers():
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding, Qwen2_5_VLTextConfig

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    published = Qwen2_5_VLRotaryEmbedding(
        Qwen2_5_VLTextConfig(hidden_size=256, num_attention_heads=2, rope_parameters=rope)
    )
    position_ids = torch.randint(0, 9000, (3, 40), generator=torch.Generator().manual_seed(0))
    cos, sin = published(torch.zeros(1), position_ids[:, None])
    torch.testing.assert_close(mrope_tables(position_ids, 128, 1e6, (16, 24, 24)), (cos[0], sin[0]))


def test_the_plane_is_that_of_transformers():
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionRotaryEmbedding

    published = Qwen2_5_VLVisionRotaryEmbedding(Qwen2_5_VLVisionConfig(hidden_size=160, num_heads=2))
    places = torch.randint(0, 99, (30, 2), generator=torch.Generator().manual_seed(0))
    cos, sin = published(torch.zeros(1), places)
    torch.testing.assert_close(vision_tables(places, 80, 10000.0), (cos.view(30, 80), sin.view(30, 80)))


def test_turning_heads_is_that_of_transformers():
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    query = torch.randn(2, 12, 3, 16).unbind()
    cos, sin = rotary_tables(torch.arange(12), 16, 1e4)
    published = apply_rotary_pos_emb(*(x.transpose(0, 1)[None] for x in query), cos[None], sin[None])
    for ours, theirs in zip(query, published, strict=True):
        torch.testing.assert_close(rotary(ours, cos, sin), theirs[0].transpose(0, 1))
