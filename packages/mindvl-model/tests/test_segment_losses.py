# SPDX-License-Identifier: Apache-2.0
"""Sums by segment of slices, and what a model in evaluation mode records instead of the losses of training."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import smallest_config, smallest_qwen3_moe

CONFIG = smallest_config()


def test_losses_by_segment_of_slices_add_up_to_those_of_the_pack() -> None:
    """Three slices of a pack of 7 tokens padded to 9, with segments that span slices."""
    from mindvl_model.segment_losses import losses_by_segment

    losses = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 0.0, 0.0])
    labels, cu_seqlens = torch.tensor([5, -100, 5, 5, 5, 5, -100]), torch.tensor([0, 1, 4, 4, 7])
    slices = [losses_by_segment(losses[first : first + 3], labels, cu_seqlens, first) for first in (0, 3, 6)]
    assert slices[1].tolist() == [[0, 8, 0, 48], [0, 1, 0, 2]]
    assert torch.stack(slices).sum(dim=0).tolist() == [[1, 14, 0, 112], [1, 2, 0, 2]]


@pytest.mark.parametrize("config", [CONFIG, smallest_config(tie_embeddings=True)], ids=["own head", "tied"])
def test_predictions_are_the_largest_logits_of_the_positions_with_a_label(
    make_model: Callable[..., Any], config: Any
) -> None:
    model = make_model(config)
    segments = [random_segment(config, num_text=length, seed=length) for length in (40, 9, 31)]
    pack = pack_segments(segments, padding=20)
    inputs = {name: value for name, value in pack.items() if name not in ("labels", "loss_positions")}
    with torch.no_grad():
        logits = model.logits(**inputs)
    has_loss = pack["labels"] != -100
    expected = logits.argmax(dim=-1)[has_loss]
    losses = torch.nn.functional.cross_entropy(logits, pack["labels"], reduction="none")  # 0 where the label is -100
    hits = (logits.argmax(dim=-1) == pack["labels"]).float()
    with model.predictions() as found:
        assert not model.training
        model(**pack)
        model(**{**pack, "loss_positions": None})  # all positions are multiplied by the vocabulary
    assert model.training
    for one in found:
        assert torch.equal(one.tokens, expected)
        bounds = pack["cu_seqlens"].tolist()
        for number, (start, end) in enumerate(pairwise(bounds)):
            sums = [losses[start:end].sum(), has_loss[start:end].sum().float(), hits[start:end].sum()]
            torch.testing.assert_close(one.by_segment[:, number], torch.stack(sums), rtol=1e-5, atol=1e-5)


def test_evaluation_leaves_what_training_has_recorded(make_model: Callable[..., Any]) -> None:
    config = smallest_qwen3_moe()
    model = make_model(config)
    pack = pack_segments([random_segment(config, num_text=30)])
    model(**pack).backward()
    tallies = [module._tally.clone() for module in model.modules() if getattr(module, "_tally", None) is not None]
    assert tallies
    with model.predictions() as found:
        model(**pack)
    after = [module._tally for module in model.modules() if getattr(module, "_tally", None) is not None]
    assert all(torch.equal(one, other) for one, other in zip(tallies, after, strict=True))
    assert len(model.take_segment_losses()) == 1
    assert len(found) == 1
    assert model.language.output_layer.predicted is None
    model(**pack)  # training continues to record its losses
    assert (len(model.take_segment_losses()), len(found)) == (1, 1)
    model.eval()
    with model.predictions():
        model(**pack)
    assert not model.training
