# SPDX-License-Identifier: Apache-2.0
"""The operators of PyTorch behind the kernels: their rules for fake tensors, and the number of calls."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mindvl_ops import use_backend
from mindvl_ops.cases import cases

OPERATORS = ["add_rms_norm", "rms_norm", "rotary", "rotary_qkv", "swiglu"]


class Calls(TorchDispatchMode):
    """Compares the results of every call with those on fake tensors, and keeps the names of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.namespace == "mindvl":
            self.names.append(func._schema.name.removeprefix("mindvl::"))
            with FakeTensorMode() as mode:
                given = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
                fake = func(*given)
            for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (results, fake)), strict=True):
                assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        return results


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_each_direction_is_one_call_whose_fake_results_have_the_real_shapes(operator, dtype):
    case = cases(dtype, tokens=32)[operator]
    leaves = [x.clone().requires_grad_() for x in case.inputs]
    with use_backend("triton"), Calls() as calls:
        case.function(*leaves).sum().backward()
    forward, backward = calls.names
    assert forward == operator
    assert backward == {"add_rms_norm": "rms_norm_backward", "rotary": "rotary"}.get(operator, f"{operator}_backward")


@pytest.mark.parametrize("operator", OPERATORS)
def test_fake_cuda_tensors_need_no_device(operator):
    case = cases(torch.bfloat16, tokens=32)[operator]
    with FakeTensorMode() as mode, use_backend("triton"):
        inputs = [mode.from_tensor(x).to("cuda").requires_grad_() for x in case.inputs]
        output = case.function(*inputs)
    assert (output.device.type, output.dtype) == ("cuda", torch.bfloat16)
    assert output.requires_grad
