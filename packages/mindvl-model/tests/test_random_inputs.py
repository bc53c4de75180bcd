# SPDX-License-Identifier: Apache-2.0
"""Random samples follow their seed, have one placeholder per visual token, and are packed end to end."""

import torch

from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import smallest_config

CONFIG = smallest_config()


def test_a_sample_has_a_placeholder_for_each_merge_block() -> None:
    segment = random_segment(CONFIG, [(1, 4, 6)], videos=[(2, 4, 4)], num_text=3, seed=1)
    assert len(segment.input_ids) == 3 + (1 + 6 + 1 + 3) + (1 + 8 + 1 + 3)
    assert int((segment.input_ids == CONFIG.tokens.image).sum()) == 4 * 6 // 4
    assert int((segment.input_ids == CONFIG.tokens.video).sum()) == 2 * 4 * 4 // 4
    assert segment.pixel_values.shape == (24, 3 * 14 * 14)
    assert segment.pixel_values_videos.shape == (32, 2 * 3 * 14 * 14)
    assert segment.labels[-1] == CONFIG.tokens.end_of_turn


def test_a_sample_is_determined_by_its_seed() -> None:
    first, again, other = (random_segment(CONFIG, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.input_ids, again.input_ids)
    assert not torch.equal(first.input_ids, other.input_ids)


def test_padding_is_a_segment_without_labels() -> None:
    first, second = random_segment(CONFIG, num_text=4), random_segment(CONFIG, num_text=2)
    pack = pack_segments([first, second], padding=3, pad_id=0)
    assert pack["cu_seqlens"].tolist() == [0, 4, 6, 9]
    assert pack["position_ids"][0].tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert pack["input_ids"][6:].tolist() == [0, 0, 0]
    assert pack["labels"][6:].tolist() == [-100] * 3
    assert pack["max_seqlen"] == 4
