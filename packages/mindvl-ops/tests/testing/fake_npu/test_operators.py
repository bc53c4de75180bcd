# SPDX-License-Identifier: Apache-2.0
"""Binding by schema and the three kinds of derivative, for every operator that has one or lacks it."""

import sys
import warnings
from types import ModuleType

import pytest
import torch

from mindvl_ops.errors import OpsError
from mindvl_ops.testing.fake_npu import operators
from mindvl_ops.testing.fake_npu.schemas import SCHEMAS


def _r(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


INT = torch.zeros(6, 2, dtype=torch.int32)


def test_every_schema_has_values_and_prints_as_written(fake_npu):
    for schema in SCHEMAS:
        name = schema.split("(")[0]
        printed = str(operators.overload(name)._schema)
        assert printed.removeprefix("npu::").replace("=1.,", "=1.0,").split("(")[0] == name
        assert [a.name for a in operators.overload(name)._schema.arguments] == [
            part.split("=")[0].split(" ")[-1] for part in _arguments(schema)
        ]


def _arguments(schema):
    inside = schema[schema.index("(") + 1 : schema.rindex(") ->")]
    return [part.strip() for part in inside.split(",") if part.strip() != "*"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda npu, x: npu.npu_swiglu(x, 1, 2),
            r"npu::npu_swiglu\(\) expected at most 2 argument\(s\) but received 3",
        ),
        (lambda npu, x: npu.npu_swiglu(self=x), "missing value for argument 'input'"),
        (lambda npu, x: npu.npu_swiglu(x, axis=1), "Unknown keyword argument 'axis' for operator 'npu::npu_swiglu'"),
        (
            lambda npu, x: npu.npu_fusion_attention(x, x, x, 2, "TND", pre_tokens=1),
            "Unknown keyword argument 'pre_tokens'",
        ),
        (
            lambda npu, x: npu.npu_fusion_attention_v2(x, x, x, 2, "TND", pre_tockens=1),
            "Unknown keyword argument 'pre_tockens'",
        ),
        (lambda npu, x: npu.npu_fusion_attention_v2(x, x, x, 2, "TND", None), r"takes 5 positional argument\(s\)"),
        (
            lambda npu, x: npu.npu_fusion_attention(x, x, x, 2, "TND", actual_seq_qlen=torch.tensor([3])),
            r"Expected a value of type 'Optional\[List\[int\]\]' for argument 'actual_seq_qlen'",
        ),
        (lambda npu, x: npu.npu_moe_gating_top_k(x, 2, None), r"takes 2 positional argument\(s\)"),
    ],
)
def test_a_call_against_the_schema_fails_as_on_the_wheel(fake_npu, call, words):
    with pytest.raises(RuntimeError, match=words):
        call(fake_npu.torch_npu, torch.ones(3, 2, 4))


def test_operators_are_packets_under_torch_ops(fake_npu):
    assert fake_npu.torch_npu.npu_swiglu is torch.ops.npu.npu_swiglu
    assert isinstance(fake_npu.torch_npu.npu_swiglu, torch._ops.OpOverloadPacket)
    assert fake_npu.torch_npu.npu_apply_adam_w.overloads() == ["default", "out"]


RAISING = {
    "npu_add_rms_norm": lambda npu: npu.npu_add_rms_norm(_r(2, 8), _r(2, 8), _r(8))[0],
    "npu_moe_gating_top_k_softmax": lambda npu: npu.npu_moe_gating_top_k_softmax(_r(6, 8), None, 2)[0],
    "npu_apply_rotary_pos_emb": lambda npu: npu.npu_apply_rotary_pos_emb(
        _r(2, 5, 3, 64), _r(2, 5, 1, 64), torch.ones(2, 5, 1, 64), torch.ones(2, 5, 1, 64)
    )[0],
}


@pytest.mark.parametrize("name", RAISING)
def test_a_missing_derivative_raises_at_backward_and_not_before(fake_npu, name):
    output = RAISING[name](fake_npu.torch_npu)
    assert output.requires_grad
    with pytest.raises(RuntimeError, match=f"derivative for npu::{name} is not implemented"):
        output.sum().backward()


MISSING = {
    "npu_grouped_matmul": lambda npu, x: npu.npu_grouped_matmul(
        [x], [torch.ones(1, 8, 3)], group_list=torch.tensor([6]), split_item=2, group_type=0
    )[0],
    "npu_moe_init_routing": lambda npu, x: npu.npu_moe_init_routing(x, INT, INT, 6)[0],
    "npu_mrope": lambda npu, x: npu.npu_mrope(
        torch.zeros(6, dtype=torch.int64), x.repeat(1, 4), torch.ones(6, 32), torch.ones(9, 32), 32
    )[0],
    "npu_gelu_mul": lambda npu, x: npu.npu_gelu_mul(x),
    "npu_rms_norm_backward": lambda npu, x: npu.npu_rms_norm_backward(x, x.detach(), torch.ones(8), torch.ones(6, 1))[
        0
    ],
}


@pytest.mark.parametrize("name", MISSING)
def test_without_an_autograd_kernel_there_is_a_warning_and_no_gradient(fake_npu, name):
    x = _r(6, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MISSING[name](fake_npu.torch_npu, x).sum().backward()
    assert x.grad is None
    assert any(f"npu::{name}: an autograd kernel was not registered" in str(w.message) for w in caught)


def test_nodes_carry_the_names_of_the_wheel(fake_npu):
    npu = fake_npu.torch_npu
    assert npu.npu_rms_norm(_r(2, 8), _r(8))[0].grad_fn.name() == "NpuRmsNormBackward"
    assert npu.npu_moe_token_permute(_r(6, 8), INT)[0].grad_fn.name() == "NpuMoeTokenPermuteBackward"


def test_without_gradient_mode_no_node_is_made(fake_npu):
    with torch.no_grad():
        assert fake_npu.torch_npu.npu_rms_norm(_r(2, 8), _r(8))[0].grad_fn is None
    with torch.inference_mode():
        assert fake_npu.torch_npu.npu_rms_norm(torch.ones(2, 8), torch.ones(8))[0].grad_fn is None


def test_a_derivative_of_a_derivative_is_refused(fake_npu):
    x, dy = _r(2, 8), _r(2, 4)
    (grad,) = torch.autograd.grad(fake_npu.torch_npu.npu_swiglu(x), x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
        grad.sum().backward()


def test_outside_of_a_simulation_an_operator_says_so():
    operators.register_all()
    with pytest.raises(OpsError, match="the simulated NPU is not running"):
        torch.ops.npu.npu_swiglu(torch.ones(2, 4))


def test_the_simulator_refuses_to_share_a_process_with_the_real_one(monkeypatch):
    monkeypatch.setattr(operators, "_library", None)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    with pytest.raises(OpsError, match="the real torch_npu is loaded"):
        operators.register_all()
