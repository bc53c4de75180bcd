# SPDX-License-Identifier: Apache-2.0
"""Layers with fused kernels: the whole model on Triton's interpreter gives the loss and gradients of PyTorch's operators."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen2_5_vl, smallest_qwen3_moe
from mindvl_ops import use_backend
from mindvl_ops.testing.interpreter import interpreted_triton


@pytest.mark.slow
@pytest.mark.parametrize("make", [smallest_config, smallest_qwen2_5_vl, smallest_qwen3_moe, smallest_deepseek_v3])
def test_the_triton_kernels_give_the_loss_and_gradients_of_the_torch_backend(
    make_model: Callable[..., Any], make: Callable[[], Any]
) -> None:
    pytest.importorskip("triton")
    config = make()
    model = make_model(config)
    pack = pack_segments([random_segment(config, [(1, 4, 4)], seed=1), random_segment(config, num_text=5, seed=2)])
    found = []
    for backend in ("torch", "triton"):
        model.zero_grad()
        with interpreted_triton(), use_backend(backend):
            loss = model(**pack)
            loss.backward()
        found.append((loss.detach(), {name: x.grad.clone() for name, x in model.named_parameters()}))
    (expected_loss, expected), (loss, gradients) = found
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name
