# SPDX-License-Identifier: Apache-2.0
"""The DeepSeek-V3 adapter against transformers' DeepseekV3ForCausalLM and MtpModel, segment by segment."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mindvl_model.testing.rows import pack, random_segment
from mindvl_model.testing.tiny import smallest_deepseek_v3

Make = Callable[..., Any]


@torch.no_grad()
def spread_biases(model: Any) -> None:
    """Biases large enough to change who is chosen."""
    generator = torch.Generator().manual_seed(7)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


@pytest.mark.parametrize(
    "changes",
    [{}, {"yarn": None}, {"num_shared_experts": 2, "experts_per_token": 3, "rope_head_dim": 4, "num_dense_layers": 2}],
    ids=["yarn", "plain rotary", "other sizes"],
)
def test_logits_and_gradients_of_packed_segments_are_those_of_transformers(
    make_model: Make, publish: Make, published_gradients: Make, losses: Make, changes: dict[str, Any]
) -> None:
    config = smallest_deepseek_v3(**changes | {"num_mtp_layers": 0})
    model = make_model(config)
    spread_biases(model)
    published = publish(model)
    segments = [random_segment(config, num_text=length, seed=length) for length in (7, 1, 50)]
    row = pack(segments, padding=3)

    logits = model.logits(**row)
    expected = [published(segment.input_ids[None]).logits[0] for segment in segments]
    scale = torch.cat(expected).abs().max()
    assert (logits[:-3] - torch.cat(expected)).abs().max() <= 1e-4 * scale

    model(**row).backward()
    losses(expected, [segment.labels for segment in segments]).backward()
    theirs = published_gradients(published, config)
    for name, parameter in model.language.named_parameters(prefix="language"):
        assert (theirs[name] - parameter.grad).abs().max() <= 1e-4 * theirs[name].abs().max(), name


@pytest.mark.parametrize("seed", [0, 1])
def test_bf16_logits_stay_within_the_bound_of_the_paper(
    make_model: Make, publish: Make, near_in_bf16: Make, seed: int
) -> None:
    config = smallest_deepseek_v3()
    model = make_model(config, dtype=torch.bfloat16)
    near_in_bf16(model, publish(model, torch.bfloat16), random_segment(config, num_text=40, seed=seed))
