# SPDX-License-Identifier: Apache-2.0
"""The gradient norm is that of megatron-core, computed on the device; rates, decay and clipping of an update."""

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


def _factor(name: str) -> float:
    """Rates of the parts, by names of the whole model."""
    assert name.startswith("whole.")
    return {"vision": 0.5, "projector": 3.0}.get(name.split(".")[1], 1.0)


def test_an_update_clips_gradients_scales_rates_by_part_and_decays_matrices_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_train.megatron import optimizer as optimizer_module
    from mindvl_train.megatron.part_norms import _shares
    from mindvl_train.parallel_state import process_groups

    # Of a pipeline stage the names in the whole model differ from its own ones.
    monkeypatch.setattr(optimizer_module, "global_name", lambda model, name: f"whole.{name}")
    config = smallest_config()
    with process_groups(set_up_device(), seed=0):
        model = MindVLModel(config, BuildConfig())
        randomize(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        wrapped = optimizer_module.wrap_models([model])
        options = OptimizerConfig(weight_decay=0.1, clip_grad_norm=0.5)
        built = optimizer_module.build_optimizer(wrapped, options, rate_factor=_factor)
        wrapped[0](**pack_segments([random_segment(config, [(1, 4, 6)], seed=1)])).backward()
        wrapped[0].finish_grad_sync()  # type: ignore[operator]
        norm = float(optimizer_module.squared_norm(built)) ** 0.5
        assert norm > 1
        shares = [pair for part in built.chained_optimizers for pair in _shares(part) if pair[1] is not None]
        gradients = [share.grad.clone() for _, share in shares]
        optimizer_module.update(built, 0.01, norm)
        groups = {id(share): group for group in built.param_groups for share in group["params"]}
        states = {
            id(share): state for part in built.chained_optimizers for share, state in part.optimizer.state.items()
        }
        assert len(shares) == len(names)
        for (whole, share), gradient in zip(shares, gradients, strict=True):
            name, group = names[id(whole)], groups[id(share)]
            assert group["lr"] == pytest.approx(0.01 * _factor(f"whole.{name}")), name
            assert group["weight_decay"] == (0.1 if whole.ndim > 1 else 0.0), name
            expected = (1 - options.beta1) * gradient * 0.5 / norm
            torch.testing.assert_close(states[id(share)]["exp_avg"], expected, rtol=1e-4, atol=1e-7)
