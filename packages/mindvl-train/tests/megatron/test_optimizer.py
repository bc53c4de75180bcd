# SPDX-License-Identifier: Apache-2.0
"""The gradient norm is that of megatron-core, computed on the device."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindvl_model import MindVLModel, set_up_device
from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import randomize, smallest_config, smallest_deepseek_v3
from mindvl_ops.testing.fake_npu import simulate
from mindvl_train import OptimizerConfig


@pytest.fixture(params=[smallest_config, smallest_deepseek_v3], ids=["dense", "experts"])
def optimizer(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An optimizer with the gradients of one pack."""
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_train.megatron.optimizer import build_optimizer, wrap_models
    from mindvl_train.parallel_state import process_groups

    config = request.param()
    with process_groups(set_up_device(), seed=0):
        model = MindVLModel(config, BuildConfig())
        randomize(model)
        wrapped = wrap_models([model])
        built = build_optimizer(wrapped, OptimizerConfig())
        wrapped[0](**pack_segments([random_segment(config, [(1, 4, 6)], seed=1)])).backward()
        wrapped[0].finish_grad_sync()  # type: ignore[operator]
        yield built


def test_the_norm_has_the_bits_of_megatrons_own(optimizer: Any) -> None:
    from mindvl_train.megatron.optimizer import squared_norm

    found = squared_norm(optimizer)
    expected = optimizer.get_grad_norm()
    assert expected > 0.1
    assert float(found) ** 0.5 == expected
    assert float(found) == pytest.approx(
        sum(float(p.grad.double().square().sum()) for g in optimizer.param_groups for p in g["params"]), rel=1e-6
    )


def test_the_host_does_not_wait_for_the_norm(optimizer: Any) -> None:
    from mindvl_train.megatron.optimizer import squared_norm

    with simulate() as npu:
        squared_norm(optimizer)
    assert npu.syncs == []
    with simulate() as npu:
        optimizer.get_grad_norm()
    shards = sum(len(part.get_main_grads_for_grad_norm()) for part in optimizer.chained_optimizers)
    assert npu.syncs.count("torch.tensor of tensors") == shards  # one wait for each shard: the counter sees them


def test_the_norm_of_no_gradient_is_zero() -> None:
    from mindvl_train.megatron.optimizer import squared_norm

    part = SimpleNamespace(get_main_grads_for_grad_norm=list)
    norm = squared_norm(SimpleNamespace(prepare_grads=lambda: False, chained_optimizers=[part]))
    assert (norm.shape, norm.dtype, float(norm)) == (torch.Size([]), torch.float32, 0.0)
