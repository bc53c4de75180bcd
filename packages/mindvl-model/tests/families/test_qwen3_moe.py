# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE equals Qwen3MoeForCausalLM of transformers for each segment."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import smallest_qwen3_moe

Make = Callable[..., Any]


@pytest.mark.parametrize("normalize_router", [True, False])
def test_logits_and_gradients_of_packed_segments_are_those_of_transformers(
    assert_segment_parity: Make, normalize_router: bool
) -> None:
    assert_segment_parity(smallest_qwen3_moe(normalize_router=normalize_router, aux_loss_weight=0.0))


def test_the_gradient_of_the_balancing_loss_is_that_of_transformers(
    make_model: Make, publish: Make, published_gradients: Make, losses: Make
) -> None:
    """One layer, because transformers computes one loss over all layers and mindvl the mean over layers."""
    config = smallest_qwen3_moe(num_layers=1, aux_loss_weight=0.5)
    model = make_model(config)
    published = publish(model)
    segment = random_segment(config, num_text=40)
    pack = pack_segments([segment])

    model(**pack).backward()
    output = published(segment.input_ids[None], output_router_logits=True)
    balance = load_balancing_loss_func(output.router_logits, num_experts=8, top_k=2)
    num_loss_tokens = (segment.labels != -100).sum()
    (losses([output.logits[0]], [segment.labels]) + 0.5 * balance * num_loss_tokens).backward()
    hf_gradients = published_gradients(published, config)
    for name, parameter in model.language.named_parameters(prefix="language"):
        assert (hf_gradients[name] - parameter.grad).abs().max() <= 1e-4 * hf_gradients[name].abs().max(), name
    model.finish_router_step()
    (statistics,) = model.router_statistics()
    torch.testing.assert_close(statistics.aux_loss, balance.detach())


@pytest.mark.parametrize("seed", [0, 1])
def test_bf16_logits_stay_within_the_bound_of_the_paper(
    make_model: Make, publish: Make, near_in_bf16: Make, seed: int
) -> None:
    config = smallest_qwen3_moe()
    model = make_model(config, dtype=torch.bfloat16)
    near_in_bf16(model, publish(model, torch.bfloat16), random_segment(config, num_text=40, seed=seed))
