# SPDX-License-Identifier: Apache-2.0
"""A recorded call goes to JSON and back and can be made again."""

import json

import pytest
import torch

from mindvl_ops.testing.fake_npu import Call, RefusedError, TensorSpec


def test_a_call_is_kept_with_shapes_strides_and_plain_values(fake_npu):
    query = torch.zeros(4, 16, 2, requires_grad=True).transpose(1, 2)
    fake_npu.torch_npu.npu_fusion_attention(
        query, query, query, 2, "TND", scale=0.5, actual_seq_qlen=(1, 4), actual_seq_kvlen=[1, 4]
    )
    (call,) = fake_npu.calls
    assert call.op == "npu_fusion_attention"
    assert call.arguments["query"] == TensorSpec((4, 2, 16), "float32", (32, 1, 2), True)
    assert call.arguments["actual_seq_qlen"] == [1, 4]
    assert call.arguments["scale"] == 0.5
    assert call.arguments["sparse_mode"] == 0  # defaults are kept too
    assert call.outputs[0] == TensorSpec((4, 2, 16), "float32", (32, 16, 1), True)
    assert call.outputs[4:] == [0, 0, 2 * (1 + 9)]


def test_a_refused_call_is_kept_without_outputs(fake_npu):
    with pytest.raises(RefusedError):
        fake_npu.torch_npu.npu_swiglu(torch.zeros(2, 3))
    (call,) = fake_npu.calls
    assert call.outputs is None


def test_a_call_survives_json_and_can_be_made_again(fake_npu):
    npu = fake_npu.torch_npu
    x, weight = torch.zeros(5, 4, requires_grad=True), torch.zeros(3, 4, 6)
    npu.npu_grouped_matmul(
        [x], [weight], group_list=torch.tensor([5, 0, 0]), split_item=2, group_type=0, group_list_type=1
    )
    (call,) = fake_npu.calls
    again = Call.from_json(json.loads(json.dumps(call.to_json())))
    assert again == call
    arguments = again.empty_arguments("cpu")
    assert arguments["x"][0].shape == (5, 4)
    assert arguments["x"][0].requires_grad
    assert arguments["bias"] is None
    arguments["group_list"] = torch.tensor([5, 0, 0])
    npu.npu_grouped_matmul(**arguments)
    assert fake_npu.calls[1] == call


def test_calls_are_kept_with_and_without_gradient_mode(fake_npu):
    x = torch.zeros(2, 4)
    with torch.no_grad():
        fake_npu.torch_npu.npu_swiglu(x)
    with torch.inference_mode():
        fake_npu.torch_npu.npu_swiglu(x)
    fake_npu.torch_npu.npu_swiglu(x)
    assert [call.op for call in fake_npu.calls] == ["npu_swiglu"] * 3
