# SPDX-License-Identifier: Apache-2.0
"""Attached features have the gradients of a plain addition, also if layers are recomputed on their own."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindvl_model.deepstack import attach


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_gradients_are_those_of_a_plain_addition(recompute: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(3)]
    source = torch.randn(5, 1, 4, generator=generator, requires_grad=True)
    embeddings = torch.randn(5, 1, 4, generator=generator, requires_grad=True)

    def layer(hidden: torch.Tensor, number: int, added: dict[int, torch.Tensor]) -> torch.Tensor:
        output = torch.tanh(hidden @ weights[number])
        return output + added[number] if number in added else output

    def run(attached: bool) -> list[torch.Tensor]:
        features = [source.sin(), (2 * source).cos()]  # share a graph, as the outputs of one vision encoder
        added: dict[int, torch.Tensor] = {}
        if attached:
            hidden = attach(embeddings, features, added)
        else:
            hidden, added = embeddings, dict(enumerate(features, start=1))
        for number in range(3):
            if recompute and attached:
                hidden = checkpoint(layer, hidden, number, added, use_reentrant=True)  # type: ignore[assignment]
            else:
                hidden = layer(hidden, number, added)
        leaves = [*weights, source, embeddings]
        for leaf in leaves:
            leaf.grad = None
        hidden.square().sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    for actual, expected in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(actual, expected)


def test_frozen_features_are_added_without_gradients() -> None:
    added: dict[int, torch.Tensor] = {}
    embeddings = torch.ones(2, 1, 3, requires_grad=True)
    assert attach(embeddings, [torch.full((2, 1, 3), 2.0)], added) is embeddings
    assert torch.equal(added[1], torch.full((2, 1, 3), 2.0))
    assert not added[1].requires_grad


def test_features_of_a_later_stage_are_added_after_its_own_layers() -> None:
    added: dict[int, torch.Tensor] = {}
    attach(torch.ones(2, 1, 3), [torch.full((2, 1, 3), value) for value in (2.0, 3.0)], added, first_layer=4)
    assert {layer: float(feature[0, 0, 0]) for layer, feature in added.items()} == {4: 2.0, 5: 3.0}
