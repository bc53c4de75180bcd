# SPDX-License-Identifier: Apache-2.0
"""Activations in host memory: the same gradients to the bit, what is copied, when, and that it is freed."""

from collections.abc import Callable
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mindvl_model import MindVLConfig, MindVLModel
from mindvl_model.parallel_config import BuildConfig, RecomputeConfig
from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import randomize, smallest_config, smallest_deepseek_v3, smallest_qwen3_moe


def offload(**options: Any) -> Any:
    from mindvl_model.megatron.offload import ActivationOffload

    return ActivationOffload(**options)


def trained(config: MindVLConfig, kind: Any = "none", keeper: Any = None) -> dict[str, Tensor]:
    """Loss and gradients of two packs that are in flight together, as in a pipeline."""
    model = MindVLModel(config, BuildConfig(recompute=RecomputeConfig(kind=kind)))
    randomize(model)
    if keeper is not None:
        keeper.install(model.language.decoder.layers)
    packs = [pack_segments([random_segment(config, [(1, 4, 6)], seed=seed)], padding=3) for seed in (1, 2)]
    losses = [model(**pack) for pack in packs]
    for loss in losses:
        loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"loss": torch.stack(losses).detach(), **found}


@pytest.mark.parametrize("kind", ["none", "selective"])
@pytest.mark.parametrize("make", [smallest_config, smallest_qwen3_moe, smallest_deepseek_v3])
def test_loss_and_gradients_are_the_same_to_the_bit_and_host_memory_is_freed(
    make: Callable[[], MindVLConfig], kind: str
) -> None:
    config, keeper = make(), offload(smallest_bytes=1)
    expected, found = trained(config, kind), trained(config, kind, keeper)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert keeper.peak_host_bytes > 10_000
    assert keeper.host_bytes == 0


class Layer(nn.Module):
    """Saves its input, a constant of the pack, a product, a small tensor and an index."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 8), 0.5))

    def forward(self, x: Tensor, packed_seq_params: Any) -> Tensor:
        y = (x @ self.weight) * packed_seq_params.cos
        small = y[:1, :1] * y[1:2, :1]
        return y.sigmoid().gather(1, packed_seq_params.index) + small


def run(layers: list[Layer], x: Tensor) -> Tensor:
    pack = SimpleNamespace(cos=torch.full((16, 8), 2.0), index=torch.zeros(16, 8, dtype=torch.int64))
    for layer in layers:
        x = layer(x, packed_seq_params=pack)
    return x


def test_only_large_activations_of_the_layer_are_copied_each_once() -> None:
    keeper, layer = offload(smallest_bytes=16 * 8 * 4), Layer()
    keeper.install([layer])
    x = torch.randn(16, 8, requires_grad=True)
    output = run([layer], x)
    # The input and the result of the sigmoid, [16, 8] float32 each. The weight, the cosine and the index stay.
    assert keeper.host_bytes == 2 * 16 * 8 * 4
    output.sum().backward()
    del output
    assert keeper.host_bytes == 0


def test_a_layer_is_fetched_while_the_one_after_it_is_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindvl_model.megatron import offload as module

    keeper, layers, log = offload(smallest_bytes=1), [Layer() for _ in range(3)], []
    keeper.install(layers)
    fetch, unpack = module._SavedLayer.fetch, module._unpack
    monkeypatch.setattr(
        module._SavedLayer, "fetch", lambda self: (self._tensors and log.append(id(self))) or fetch(self)
    )
    monkeypatch.setattr(module, "_unpack", lambda saved: log.append("read") or unpack(saved))
    output = run(layers, torch.randn(16, 8, requires_grad=True))
    last = keeper._before
    order = [last, last._before, last._before._before]
    output.sum().backward()
    assert order[2]._before is None
    events = [event for event, _ in groupby(log)]
    # The last two layers with the first read; the first one when the backward pass of the second begins.
    assert events == ["read", id(order[0]), id(order[1]), "read", id(order[2]), "read"]


def test_a_graph_can_be_used_twice() -> None:
    keeper, layers = offload(smallest_bytes=1), [Layer(), Layer()]
    x = torch.randn(16, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(run(layers, x).sum(), x)
    keeper.install(layers)
    total = run(layers, x).sum()
    (first,) = torch.autograd.grad(total, x, retain_graph=True)
    (second,) = torch.autograd.grad(total, x)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


def test_without_gradients_nothing_is_copied() -> None:
    keeper, layers = offload(smallest_bytes=1), [Layer()]
    keeper.install(layers)
    with torch.no_grad():
        run(layers, torch.randn(16, 8))
    assert keeper.peak_host_bytes == 0


def test_the_model_offloads_the_first_layers_of_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindvl_model.megatron.offload import ActivationOffload

    installed: list[Any] = []
    monkeypatch.setattr(ActivationOffload, "install", lambda self, layers: installed.extend(layers))
    model = MindVLModel(smallest_config(), BuildConfig(recompute=RecomputeConfig(offload_layers=1)))
    assert installed == [model.language.decoder.layers[0]]
    MindVLModel(smallest_config(), BuildConfig())
    assert len(installed) == 1
