# SPDX-License-Identifier: Apache-2.0
"""What is compared between the simulator and the wheel: representative calls, and what can be seen of each.

Imported by the tests, where real tensors meet the simulator, and by the child, where fake tensors meet the wheel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mindvl_ops.testing.fake_npu.calls import Call

HOST_TENSORS = ("actual_seq_qlen", "actual_seq_kvlen")  # version 3 of the attention takes them on the CPU


def observe(function: Callable[..., Any], arguments: dict[str, Any], uses: Sequence[int]) -> dict[str, Any]:
    """Outputs and gradients of one call, without their values; errors by their first line."""
    try:
        outputs = function(**arguments)
    except Exception as error:
        return {"error": _words(error)}
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    seen: dict[str, Any] = {"outputs": [_seen(output) for output in outputs]}
    learned = {name: value for name, value in _tensors(arguments) if value.requires_grad}
    starts = [outputs[index] for index in uses if isinstance(outputs[index], Tensor) and outputs[index].requires_grad]
    if not learned or not starts:
        return seen
    try:
        grads = torch.autograd.grad(
            starts, list(learned.values()), [torch.ones_like(start) for start in starts], allow_unused=True
        )
    except Exception as error:
        return {**seen, "backward_error": _words(error)}
    return {**seen, "gradients": {name: _seen(grad) for name, grad in zip(learned, grads, strict=True)}}


def _words(error: Exception) -> str:
    name = "RuntimeError" if isinstance(error, RuntimeError) else type(error).__name__  # a refusal of ours is one
    return f"{name}: {str(error).splitlines()[0].strip()}"


def _tensors(arguments: dict[str, Any]) -> list[tuple[str, Tensor]]:
    found = []
    for name, value in arguments.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        found += [(f"{name}[{i}]", each) for i, each in enumerate(values) if isinstance(each, Tensor)]
    return found


def _seen(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return None if value is None else "number"  # a meta kernel knows none of them
    node = value.grad_fn.name() if value.grad_fn is not None else None
    return {"shape": list(value.shape), "dtype": str(value.dtype), "node": _node(node)}


def _node(name: str | None) -> str | None:
    """The name of a node without what differs between C++ and Python."""
    if name is None:
        return None
    last = name.split("::")[-1].removesuffix("0").removesuffix("Backward")
    return {"_ErrorNode": "raises", "NotImplemented": "raises", "WarnNotImplemented": "missing"}.get(last, last)


def on_device(call: Call, device: str) -> dict[str, Any]:
    """The arguments of a recorded call as empty tensors on `device`."""
    arguments = call.empty_arguments(device)
    host = call.empty_arguments("cpu") if call.op.startswith("npu_fusion_attention_v3") else {}
    return {name: host[name] if name in HOST_TENSORS and name in host else value for name, value in arguments.items()}


def _f(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def _i(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)


def _attention(layout: str) -> dict[str, Any]:
    shapes = {
        "TND": ((10, 4, 64), (10, 2, 64), (10, 2, 32)),
        "BNSD": ((2, 4, 10, 64), (2, 2, 12, 64), (2, 2, 12, 32)),
        "BSND": ((2, 10, 4, 64), (2, 12, 2, 64), (2, 12, 2, 32)),
        "BSH": ((2, 10, 256), (2, 12, 128), (2, 12, 128)),
        "SBH": ((10, 2, 256), (12, 2, 128), (12, 2, 128)),
    }[layout]
    query, key, value = (_f(*shape) for shape in shapes)
    return {"query": query, "key": key, "value": value, "head_num": 4, "input_layout": layout}


_ENDS = {"actual_seq_qlen": [4, 10], "actual_seq_kvlen": [4, 10]}
_MASK = {"atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1), "sparse_mode": 3}
_F32 = torch.float32
_ROUTES = (
    torch.eye(4, dtype=torch.bool)[torch.arange(6) % 4] | torch.eye(4, dtype=torch.bool)[(torch.arange(6) + 1) % 4]
)
_GROUPS = {"group_list": torch.tensor([3, 0, 2]), "group_list_type": 1}


def _adam(**more: Any) -> dict[str, Any]:
    scalars = ("beta1_power", "beta2_power", "lr", "weight_decay", "beta1", "beta2", "epsilon")
    rest = {"max_grad_norm": None, "amsgrad": False, "maximize": False}
    return {**dict.fromkeys(scalars, 0.5), "grad": torch.zeros(4), **rest, **more}


# name -> operator, arguments
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"attention {name}": ("npu_fusion_attention", _attention(name)) for name in ("BNSD", "BSND", "BSH", "SBH")},
    "attention TND": ("npu_fusion_attention", {**_attention("TND"), **_ENDS, **_MASK}),
    "attention TND layout": ("npu_fusion_attention", {**_attention("TND"), **_ENDS, "softmax_layout": "TND"}),
    "attention pse": ("npu_fusion_attention", {**_attention("BNSD"), "pse": _f(2, 4, 10, 12)}),
    "attention sink": ("npu_fusion_attention", {**_attention("BNSD"), "sink": _f(4, dtype=_F32)}),
    "attention v2 BNSD": ("npu_fusion_attention_v2", _attention("BNSD")),
    "attention v2 TND": ("npu_fusion_attention_v2", {**_attention("TND"), **_ENDS}),
    "attention v3 BNSD": ("npu_fusion_attention_v3", _attention("BNSD")),
    "attention gradient": (
        "npu_fusion_attention_grad",
        {
            **_attention("TND"), **_ENDS, "dy": _f(10, 4, 32), "attention_in": _f(10, 4, 32),
            "softmax_max": _f(10, 4, 8, dtype=_F32), "softmax_sum": _f(10, 4, 8, dtype=_F32),
        },
    ),
    "rms norm": ("npu_rms_norm", {"input": _f(2, 3, 8), "gamma": _f(8)}),
    "rms norm, wide gamma": ("npu_rms_norm", {"input": _f(2, 3, 8), "gamma": _f(8, dtype=_F32)}),
    "rms norm over two axes": ("npu_rms_norm", {"input": _f(2, 3, 8), "gamma": _f(3, 8)}),
    "rms norm backward": (
        "npu_rms_norm_backward",
        {"dy": _f(2, 3, 8), "input": _f(2, 3, 8), "gamma": _f(8), "rstd": _f(2, 3, 1, dtype=_F32)},
    ),
    "add rms norm": ("npu_add_rms_norm", {"x1": _f(2, 3, 8), "x2": _f(2, 3, 8), "gamma": _f(8)}),
    "rotary": ("npu_rotary_mul", {"input": _f(5, 3, 8), "r1": _f(5, 1, 8), "r2": _f(5, 1, 8)}),
    "rotary, constant tables": (
        "npu_rotary_mul",
        {"input": _f(5, 3, 8), "r1": _f(5, 1, 8).detach(), "r2": _f(5, 1, 8).detach(), "rotary_mode": "interleave"},
    ),
    "rotary backward": (
        "npu_rotary_mul_backward",
        {"grad": _f(5, 3, 8), "input": _f(5, 3, 8), "r1": _f(5, 1, 8), "r2": _f(5, 1, 8)},
    ),
    "apply rotary": (
        "npu_apply_rotary_pos_emb",
        {"query": _f(2, 5, 3, 64) * 1, "key": _f(2, 5, 1, 64) * 1, "cos": _f(2, 5, 1, 64), "sin": _f(2, 5, 1, 64)},
    ),
    "mrope": (
        "npu_mrope",
        {
            "positions": _i(3, 5), "query": _f(5, 128), "key": _f(5, 64), "cos_sin_cache": _f(99, 64), "head_size": 64,
            "mrope_section": [16, 8, 8],
        },
    ),
    "swiglu": ("npu_swiglu", {"input": _f(3, 8)}),
    "swiglu along rows": ("npu_swiglu", {"input": _f(4, 3), "dim": 0}),
    "swiglu backward": ("npu_swiglu_backward", {"grad_output": _f(3, 4), "input": _f(3, 8)}),
    "masked softmax": (
        "npu_scaled_masked_softmax",
        {"x": _f(2, 4, 32, 32), "mask": torch.zeros(2, 1, 32, 32, dtype=torch.bool), "scale": 0.5},
    ),
    "masked softmax backward": (
        "npu_scaled_masked_softmax_backward",
        {
            "y_grad": _f(2, 4, 32, 32), "y": _f(2, 4, 32, 32), "mask": torch.zeros(2, 4, 32, 32, dtype=torch.bool),
            "scale": 1.0, "fixed_triu_mask": False,
        },
    ),
    "permute": ("npu_moe_token_permute", {"tokens": _f(5, 8), "indices": _i(5, 2)}),
    "permute, cut": ("npu_moe_token_permute", {"tokens": _f(5, 8), "indices": _i(5, 2), "num_out_tokens": 7}),
    "unpermute": (
        "npu_moe_token_unpermute",
        {"permuted_tokens": _f(10, 8), "sorted_indices": _i(10), "probs": _f(5, 2)},
    ),
    "unpermute, wide probs": (
        "npu_moe_token_unpermute",
        {"permuted_tokens": _f(10, 8), "sorted_indices": _i(10), "probs": _f(5, 2, dtype=_F32)},
    ),
    "unpermute alone": ("npu_moe_token_unpermute", {"permuted_tokens": _f(10, 8), "sorted_indices": _i(10)}),
    "permute by map": (
        "npu_moe_token_permute_with_routing_map",
        {"tokens": _f(6, 8), "routing_map": _ROUTES, "num_out_tokens": 12},
    ),
    "permute by map with probs": (
        "npu_moe_token_permute_with_routing_map",
        {"tokens": _f(6, 8), "routing_map": _ROUTES, "probs": _f(6, 4), "num_out_tokens": 12},
    ),
    "permute by map, padded": (
        "npu_moe_token_permute_with_routing_map",
        {"tokens": _f(6, 8), "routing_map": _ROUTES, "probs": _f(6, 4), "num_out_tokens": 8, "drop_and_pad": True},
    ),
    "unpermute by map": (
        "npu_moe_token_unpermute_with_routing_map",
        {
            "permuted_tokens": _f(12, 8), "sorted_indices": _i(12), "restore_shape": [6, 8], "probs": _f(6, 4),
            "routing_map": _ROUTES,
        },
    ),
    "gating": ("npu_moe_gating_top_k", {"x": _f(6, 64), "k": 4, "norm_type": 1}),
    "gating, groups": (
        "npu_moe_gating_top_k",
        {"x": _f(6, 64), "k": 4, "bias": _f(64).detach(), "k_group": 2, "group_count": 8, "norm_type": 1},
    ),
    "gating, learned bias": ("npu_moe_gating_top_k", {"x": _f(6, 64), "k": 4, "bias": _f(64)}),
    "gating softmax": ("npu_moe_gating_top_k_softmax", {"x": _f(6, 64), "k": 4}),
    "init routing": (
        "npu_moe_init_routing",
        {"x": _f(6, 8), "row_idx": _i(6, 2), "expert_idx": _i(6, 2), "active_num": 4},
    ),
    "grouped rows": (
        "npu_grouped_matmul",
        {"x": [_f(5, 4)], "weight": [_f(3, 4, 6)], **_GROUPS, "split_item": 2, "group_type": 0},
    ),
    "grouped inner axis": (
        "npu_grouped_matmul",
        {"x": [_f(5, 4).T], "weight": [_f(5, 6)], **_GROUPS, "split_item": 3, "group_type": 2},
    ),
    "grouped pairs": (
        "npu_grouped_matmul",
        {"x": [_f(5, 4), _f(2, 3)], "weight": [_f(4, 6), _f(3, 7)], "group_type": -1},
    ),
    "grouped, no type": ("npu_grouped_matmul", {"x": [_f(5, 4)], "weight": [_f(3, 4, 6)], **_GROUPS, "split_item": 2}),
    "grouped by list": (
        "npu_grouped_matmul.List",
        {"x": [_f(5, 4)], "weight": [_f(4, 6)] * 3, "group_list": [3, 3, 5], "split_item": 3},
    ),
    "grouped sum": (
        "npu_grouped_matmul_add",
        {"input": torch.zeros(3, 4, 6), "x": _f(5, 4), "weight": _f(5, 6), "group_list": torch.tensor([3, 3, 5])},
    ),
    "grouped sum in place": (
        "npu_grouped_matmul_add_",
        {"input": torch.zeros(3, 4, 6), "x": _f(5, 4), "weight": _f(5, 6), "group_list": torch.tensor([3, 3, 5])},
    ),
    "cross entropy": ("npu_cross_entropy_loss", {"input": _f(4, 10), "target": _i(4, dtype=torch.int64)}),
    "cross entropy, each": (
        "npu_cross_entropy_loss",
        {"input": _f(4, 10), "target": _i(4, dtype=torch.int64), "reduction": "none"},
    ),
    "adamw": ("npu_apply_adam_w.out", _adam(out=[torch.zeros(4), torch.zeros(4), torch.zeros(4)])),
    "adamw without out": ("npu_apply_adam_w", _adam()),
    "gelu": ("npu_gelu", {"input": _f(3, 4)}),
    "fast gelu": ("fast_gelu", {"input": _f(3, 4)}),
    "gelu mul": ("npu_gelu_mul", {"input": _f(3, 4)}),
    "dtype cast": ("npu_dtype_cast", {"input": _f(3, 4), "dtype": 6}),
    "format cast": ("npu_format_cast", {"input": _f(3, 4), "acl_format": 2}),
    "convolution": (
        "npu_conv3d",
        {
            "input": _f(2, 3, 2, 4, 4), "weight": _f(8, 3, 2, 4, 4), "bias": None, "stride": [2, 4, 4],
            "padding": [0, 0, 0], "dilation": [1, 1, 1], "groups": 1,
        },
    ),
}  # fmt: skip
