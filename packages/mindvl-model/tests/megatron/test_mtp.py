# SPDX-License-Identifier: Apache-2.0
"""Shifting inside segments and the reported loss of multi-token prediction; values are compared in language/."""

from collections.abc import Callable
from typing import Any

import torch

from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import smallest_deepseek_v3
from mindvl_ops import Segments

CONFIG = smallest_deepseek_v3()


def test_values_are_shifted_inside_their_segment_only() -> None:
    from mindvl_model.megatron.mtp import shifted

    values, segments = torch.tensor([1, 2, 3, 4, 5, 6, 7]), Segments([3, 1, 0, 3])
    assert shifted(values, segments, 1, -100).tolist() == [2, 3, -100, -100, 6, 7, -100]
    assert shifted(values, segments, 2, 0).tolist() == [3, 0, 0, 0, 7, 0, 0]
    assert shifted(values, segments, 9, 0).tolist() == [0] * 7


def test_packed_segments_have_the_loss_of_separate_packs(make_model: Callable[..., Any]) -> None:
    model = make_model(CONFIG)
    segments = [random_segment(CONFIG, num_text=length, seed=length) for length in (12, 2, 8)]
    packed, alone = pack_segments(segments, padding=4), [pack_segments([segment]) for segment in segments]
    model(**packed)
    together = model.take_mtp_loss()
    for pack in alone:
        model(**pack)
    apart = model.take_mtp_loss()
    torch.testing.assert_close(together, apart, rtol=1e-6, atol=0)
    num_labels = sum(int((segment.labels[1:] != -100).sum()) for segment in segments)
    assert together[0, 1] == num_labels
    assert model.take_mtp_loss() is None


def test_the_reported_loss_is_that_of_the_next_token_alone(make_model: Callable[..., Any]) -> None:
    model, without = make_model(CONFIG), make_model(smallest_deepseek_v3(num_mtp_layers=0))
    without.load_state_dict(model.state_dict(), strict=False)
    pack = pack_segments([random_segment(CONFIG, num_text=20)])
    assert torch.equal(model(**pack), without(**pack))
