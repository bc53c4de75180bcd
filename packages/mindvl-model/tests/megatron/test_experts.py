# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts layer equals a loop over tokens; initialization of expert weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mindvl_model.parameters import initialize, initialize_parameter
from mindvl_model.testing.tiny import smallest_deepseek_v3, smallest_qwen3_moe
from mindvl_ops import use_backend
from mindvl_ops.testing.fake_npu import FakeNpu

Make = Callable[..., Any]


def gated_mlp(token: torch.Tensor, gate_and_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (token @ gate_and_up).chunk(2)
    return (torch.nn.functional.silu(gate) * up) @ down


def test_a_token_is_the_weighted_sum_of_its_experts_and_the_shared_expert(make_model: Make) -> None:
    """Computed token by token, with two of four groups, two of their four experts, and weights that sum to 2.5."""
    from mindvl_model.megatron.packing import PackedSequence

    layer = make_model(smallest_deepseek_v3()).language.decoder.layers[1].mlp
    tokens = torch.randn(6, 24, generator=torch.Generator().manual_seed(0))
    layer.router.pack = PackedSequence()
    output, bias = layer(tokens.unsqueeze(1))
    assert bias is None
    fc1, fc2, shared = layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight, layer.shared_experts
    for token, result in zip(tokens, output.squeeze(1), strict=True):
        scores = torch.sigmoid(layer.router.weight.detach() @ token)
        choice = scores + layer.router.expert_bias
        group_scores = [float(choice[2 * group] + choice[2 * group + 1]) for group in range(4)]
        groups = sorted(range(4), key=group_scores.__getitem__)[-2:]
        candidates = [expert for group in groups for expert in (2 * group, 2 * group + 1)]
        chosen = sorted(candidates, key=lambda expert: float(choice[expert]))[-2:]
        total = sum(scores[expert] for expert in chosen)
        expected = gated_mlp(token, shared.linear_fc1.weight.T, shared.linear_fc2.weight.T)
        for expert in chosen:
            expected = expected + 2.5 * scores[expert] / total * gated_mlp(token, fc1[expert], fc2[expert])
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_expert_weights_are_marked_alike_in_every_layout(make_model: Make) -> None:
    """Optimizer states then have one form, and a checkpoint can be loaded with another ep_size."""
    for name, parameter in make_model(smallest_deepseek_v3()).named_parameters():
        is_routed = ".mlp.experts." in name
        assert getattr(parameter, "allreduce", True) != is_routed, name


def test_initial_weights_of_an_expert_do_not_depend_on_its_rank(make_model: Make) -> None:
    from mindvl_model.megatron.experts import GroupedLinear

    config = smallest_qwen3_moe()
    model = make_model(config)
    initialize(model, config, seed=3)
    layer = model.language.decoder.layers[1].mlp
    part = GroupedLinear(layer.config, 3, 4, 12, 24)
    initialize_parameter("language.decoder.layers.1.mlp.experts.linear_fc2.weight", part.weight, config, seed=3)
    assert torch.equal(part.weight, layer.experts.linear_fc2.weight[4:7])
    assert len({float(expert.flatten()[0]) for expert in layer.experts.linear_fc2.weight.detach()}) == 8


def test_the_host_waits_once_for_a_layer_also_if_it_is_recomputed(make_model: Make, fake_npu: FakeNpu) -> None:
    """The sizes of the all-to-all, on a group of one rank, which sends all rows to itself."""
    from mindvl_model.megatron.expert_messages import ExpertMessages
    from mindvl_model.megatron.packing import PackedSequence

    layer = make_model(smallest_qwen3_moe()).language.decoder.layers[0].mlp
    layer.router.pack, layer.router.is_recomputed = PackedSequence(), True
    layer.messages = ExpertMessages(8, 1, None, None)
    counts = torch.tensor([3, 0, 2, 0, 0, 1, 0, 4])
    with torch.no_grad():
        first = layer._exchanged_sizes(counts, in_blocks=False)
    assert fake_npu.syncs == ["tolist"]
    assert (first[0].shape, first[1:]) == (torch.Size([1, 8]), ([10], [10]))
    again = layer._exchanged_sizes(counts, in_blocks=False)
    assert fake_npu.syncs == ["tolist"]
    assert again is first
    assert not layer.router.pack.expert_rows  # nothing is kept after the backward pass

    layer.router.is_recomputed = False
    layer._exchanged_sizes(counts, in_blocks=False)
    assert fake_npu.syncs == ["tolist"] * 2
    assert not layer.router.pack.expert_rows


@pytest.mark.parametrize("rows", [16, 12])
def test_with_blocks_the_host_waits_for_nothing_and_no_bit_changes(
    make_model: Make, fake_npu: FakeNpu, rows: int
) -> None:
    """Forward and backward on a group of one rank, which sends all rows to itself."""
    from mindvl_model.megatron.expert_messages import ExpertMessages
    from mindvl_model.megatron.packing import PackedSequence
    from mindvl_model.parallel_config import ExpertBlocks

    layer = make_model(smallest_qwen3_moe()).language.decoder.layers[0].mlp
    layer.router.pack = PackedSequence()
    results = {}
    for blocks in (None, ExpertBlocks(rows=rows, most_rows=16)):
        layer.messages = messages = ExpertMessages(8, 1, 12.0, blocks)
        tokens = torch.randn(6, 1, 24, generator=torch.Generator().manual_seed(0)).requires_grad_()
        layer.zero_grad()
        fake_npu.syncs.clear()
        with use_backend("npu"):
            output, _ = layer(tokens)
            output.square().sum().backward()
        waits = [one for one in fake_npu.syncs if one == "tolist"]
        results[blocks] = output, tokens.grad, *(p.grad for p in layer.parameters())
        if blocks is None:
            assert len(waits) == 1
            assert float(messages.take_factor(tokens.device)) == 1
    assert not waits
    assert all(torch.equal(*pair) for pair in zip(*results.values(), strict=True))
    layer.eval()
    layer(tokens)
    assert "tolist" in fake_npu.syncs  # exact sizes outside of training
