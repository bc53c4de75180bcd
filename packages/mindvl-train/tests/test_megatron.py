# SPDX-License-Identifier: Apache-2.0
"""Gradient buffers, optimizer, schedule and tensors of a checkpoint, each alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mindvl_model import MindVLModel, enter
from mindvl_model.parameters import set_trainable
from mindvl_model.testing.tiny import randomize, smallest_config
from mindvl_train import OptimizerConfig

CONFIG = smallest_config()


@pytest.fixture
def model() -> Iterator[MindVLModel]:
    from mindvl_model.megatron.blocks import Layout
    from mindvl_train.parallel import process_groups

    with process_groups(enter(), seed=0):
        built = MindVLModel(CONFIG, Layout())
        randomize(built)
        yield built


def test_the_optimizer_holds_what_is_trained_and_nothing_else(model: MindVLModel) -> None:
    from mindvl_train.megatron.optimizer import build_optimizer, wrap_models

    set_trainable(model, ["projector"])
    optimizer = build_optimizer(wrap_models([model]), OptimizerConfig())
    held = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    assert held == sum(parameter.numel() for parameter in model.projector.parameters())  # type: ignore[union-attr]


def test_vectors_are_not_decayed_and_matrices_are(model: MindVLModel) -> None:
    from mindvl_train.megatron.optimizer import build_optimizer, update, wrap_models

    wrapped = wrap_models([model])
    optimizer = build_optimizer(wrapped, OptimizerConfig(weight_decay=0.5, clip_grad_norm=0.0))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    wrapped[0].zero_grad_buffer()  # type: ignore[operator]
    assert update(optimizer, 0.1) == 0.0  # without gradients only decay is left
    for name, parameter in model.named_parameters():
        kept = 1.0 if parameter.ndim == 1 else 1 - 0.1 * 0.5
        torch.testing.assert_close(parameter.detach(), before[name] * kept, msg=lambda text, n=name: f"{n}: {text}")


def test_tensors_come_back_into_another_model(model: MindVLModel, tmp_path: Path) -> None:
    from mindvl_model.megatron.blocks import Layout
    from mindvl_train.megatron.checkpoint import load_tensors, save_tensors, unwrap
    from mindvl_train.megatron.optimizer import build_optimizer, wrap_models

    wrapped = wrap_models([model])
    assert unwrap(wrapped[0]) is model
    optimizer = build_optimizer(wrapped, OptimizerConfig())
    wrapped[0].zero_grad_buffer()  # type: ignore[operator]
    optimizer.step()
    save_tensors(tmp_path, wrapped[0], optimizer)
    other: Any = MindVLModel(CONFIG, Layout())
    randomize(other, seed=8)
    load_tensors(tmp_path, other, None)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
