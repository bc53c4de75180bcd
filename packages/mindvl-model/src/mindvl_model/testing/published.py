# SPDX-License-Identifier: Apache-2.0
"""Samples of every kind, and logits, loss and gradients of a transformers class for them, one call per sample.

Used by the tests of whole models; the packed sequence of the same samples is compared with them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from mindvl_model.config import MindVLConfig
from mindvl_model.hf.inputs import hf_inputs, pack_for
from mindvl_model.random_inputs import RandomSegment, random_segment
from mindvl_model.weights.names import published_name, weight_rules

_PADDING = 4
SEGMENTS: dict[str, list[dict[str, Any]]] = {
    "an image": [{"grids": [(1, 6, 10)]}],
    "two images": [{"grids": [(1, 4, 6), (1, 10, 4)]}],
    "a video": [{"videos": [(3, 4, 6)]}],
    "text": [{"num_text": 17}],
    "all of them packed": [
        {"grids": [(1, 6, 4)]},
        {"num_text": 9},
        {"grids": [(1, 8, 2), (1, 2, 12)], "videos": [(2, 4, 4), (1, 2, 6)]},
        {"videos": [(4, 2, 4)]},
    ],
}


def make_segments(config: MindVLConfig, kind: str) -> list[RandomSegment]:
    """The samples of an entry of SEGMENTS."""
    return [random_segment(config, seed=seed, **each) for seed, each in enumerate(SEGMENTS[kind])]


def separate_calls(published: Any, segments: Sequence[RandomSegment], config: MindVLConfig) -> tuple[Any, Any]:
    """Logits [T, V] from one call per segment, and the summed loss."""
    logits, losses = [], []
    for segment in segments:
        published.model.rope_deltas = None
        logits.append(published(**hf_inputs(segment, config)).logits[0])
        losses.append(F.cross_entropy(logits[-1].float(), segment.labels, reduction="sum"))
    return torch.cat(logits), torch.stack(losses).sum()


def assert_equals_published(model: Any, published: Any, kind: str) -> None:
    """Check logits, loss and every gradient of the packed samples of an entry of SEGMENTS."""
    config = model.mindvl
    segments = make_segments(config, kind)
    pack = pack_for(published, segments, config, padding=_PADDING)
    expected, expected_loss = separate_calls(published, segments, config)
    assert (model.logits(**pack)[:-_PADDING] - expected).abs().max() <= 1e-4 * expected.abs().max()
    loss = model(**pack)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    loss.backward()
    expected_loss.backward()
    actual: dict[str, torch.Tensor] = {}  # the weight rules only rearrange values, so they convert gradients too
    for rule in weight_rules(config):
        pieces = rule.split(model.get_parameter(rule.param_name).grad)
        actual.update(zip(map(published_name, rule.hf_names), pieces, strict=True))
    hf_parameters = {published_name(name): parameter for name, parameter in published.named_parameters()}
    assert actual.keys() == hf_parameters.keys()
    for name, parameter in hf_parameters.items():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found = actual[name]
        if name.endswith(("gate_up_proj", "down_proj")) and found.shape != wanted.shape:
            found = found.transpose(1, 2)  # the layout of published directories
        assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max(), name
