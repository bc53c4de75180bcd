# SPDX-License-Identifier: Apache-2.0
"""npu_apply_adam_w against torch.optim.AdamW and its own limits; NpuFusedAdamW."""

import pytest
import torch

from mindvl_ops.testing.fake_npu import RefusedError

BF16 = torch.bfloat16


def _random(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _call(step, grad, out, **more):
    scalars = {"lr": 0.1, "weight_decay": 0.2, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}
    powers = {"beta1_power": 0.9 ** (step - 1), "beta2_power": 0.95 ** (step - 1)}
    rest = {"max_grad_norm": None, "amsgrad": False, "maximize": False}
    return {**powers, **scalars, **rest, "grad": grad, "out": out, **more}


@pytest.mark.parametrize("maximize", [False, True])
def test_five_steps_are_those_of_adamw(fake_npu, maximize):
    parameter = torch.nn.Parameter(_random(0, 7))
    var, m, v = parameter.detach().clone(), torch.zeros(7), torch.zeros(7)
    rival = torch.optim.AdamW([parameter], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2, maximize=maximize)
    for step in range(1, 6):
        parameter.grad = _random(step, 7)
        rival.step()
        returned = fake_npu.torch_npu.npu_apply_adam_w(**_call(step, parameter.grad, (var, m, v), maximize=maximize))
        assert [x.data_ptr() for x in returned] == [x.data_ptr() for x in (var, m, v)]
    torch.testing.assert_close(var, parameter.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(v, rival.state[parameter]["exp_avg_sq"])


def test_a_power_one_step_ahead_gives_another_first_step(fake_npu):
    results = []
    for step in (1, 2):
        out = (torch.zeros(3), torch.zeros(3), torch.zeros(3))
        fake_npu.torch_npu.npu_apply_adam_w(**_call(step, torch.ones(3), out))
        results.append(out[0][0].item())
    assert results[0] == pytest.approx(-0.1)
    assert results[1] != pytest.approx(-0.1)


def test_state_is_rounded_to_the_type_of_the_parameter(fake_npu):
    out = tuple(torch.zeros(3, dtype=BF16) for _ in range(3))
    fake_npu.torch_npu.npu_apply_adam_w(**_call(1, torch.full((3,), 0.3, dtype=BF16), out))
    assert torch.equal(out[1], torch.full((3,), (1 - 0.9) * float(torch.tensor(0.3, dtype=BF16))).to(BF16))


F = torch.zeros(3)
OUT = (F.clone(), F.clone(), F.clone())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"out": OUT[:2]}, r"out must be \(var, m, v\), got 2"),
        ({"grad": F.double()}, "grad is torch.float64"),
        ({"grad": F.bfloat16()}, "var is torch.float32, grad is torch.bfloat16: all must be one type"),
        ({"out": (F, F, F.bfloat16())}, "v is torch.bfloat16"),
        ({"out": (F, torch.zeros(2), F)}, "m .* has another shape than grad"),
        ({"amsgrad": True}, "amsgrad must be False on this device"),
    ],
)
def test_a_broken_rule_is_named(fake_npu, change, words):
    with pytest.raises(RefusedError, match=words):
        fake_npu.torch_npu.npu_apply_adam_w(**{**_call(1, F, OUT), **change})


def test_without_out_there_is_nothing_to_update(fake_npu):
    call = _call(1, F, None)
    del call["out"]
    with pytest.raises(RefusedError, match="call it with out="):
        fake_npu.torch_npu.npu_apply_adam_w(**call)


def test_amsgrad_needs_its_maximum_and_uses_it(fake_npu):
    with fake_npu.relaxed(documented_limits=False):
        with pytest.raises(RefusedError, match="amsgrad needs max_grad_norm"):
            fake_npu.torch_npu.npu_apply_adam_w(**_call(1, F, OUT, amsgrad=True))
        largest, out = torch.full((3,), 4.0), (torch.zeros(3), torch.zeros(3), torch.zeros(3))
        fake_npu.torch_npu.npu_apply_adam_w(**_call(1, torch.ones(3), out, amsgrad=True, max_grad_norm=largest))
    assert torch.equal(largest, torch.full((3,), 4.0))
    torch.testing.assert_close(out[0], torch.full((3,), -0.1 / (4.0 / 0.05) ** 0.5))


def _optimizer(fake_npu, dtype=torch.float32):
    parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    parameter.grad = torch.ones(3, dtype=dtype)
    return parameter, fake_npu.torch_npu.optim.NpuFusedAdamW([parameter], lr=0.1)


def test_the_fused_optimizer_steps_like_adamw_and_keeps_its_gradients(fake_npu):
    parameter, optimizer = _optimizer(fake_npu)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 1 - 0.1 * 1e-2 - 0.1))
    optimizer.zero_grad()
    assert torch.equal(parameter.grad, torch.zeros(3))


def test_the_fused_optimizer_refuses_bf16_set_to_none_sparse_gradients_and_moved_parameters(fake_npu):
    _, optimizer = _optimizer(fake_npu, BF16)
    with pytest.raises(TypeError, match="takes float32 and float16"):
        optimizer.step()
    parameter, optimizer = _optimizer(fake_npu)
    with pytest.raises(ValueError, match="set_to_none is not supported"):
        optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    parameter.data = parameter.data.clone()
    with pytest.raises(RuntimeError, match="a parameter moved"):
        optimizer.step()
    parameter, optimizer = _optimizer(fake_npu)
    parameter.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse"):
        optimizer.step()
