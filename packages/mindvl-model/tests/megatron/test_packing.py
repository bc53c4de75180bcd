# SPDX-License-Identifier: Apache-2.0
"""Forward and backward never wait for the device: not for a value, and not for a copy from the host.

The model and its inputs are on the device "meta", whose tensors have no values, so a read of one raises an error. Every
copy of a host tensor to it is observed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindvl_model import MindVLConfig
from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_qwen2_5_vl, smallest_qwen3_moe

ON_HOST = ("cu_seqlens", "image_grid_thw", "video_grid_thw", "max_seqlen", "loss_positions")


class Copies(TorchDispatchMode):
    """Counts copies from host to device by whether the host waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.queued, self.blocking = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if func._schema.name == "aten::_to_copy" and tensors[0].device.type == "cpu" and "device" in kwargs:
            queued = kwargs.get("non_blocking", False)
        elif func._schema.name == "aten::copy_" and [one.device.type for one in tensors] == ["meta", "cpu"]:
            queued = len(args) > 2 and args[2]
        else:
            return func(*args, **kwargs)
        self.queued += bool(queued)
        self.blocking += not queued
        return func(*args, **kwargs)


@contextmanager
def observed_copies() -> Iterator[Copies]:
    make_tensor, copies = torch.tensor, Copies()

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:  # its copy does not reach the dispatcher
        copies.blocking += torch.device(kwargs.get("device") or "cpu").type == "meta"
        return make_tensor(data, *args, **kwargs)

    with mock.patch.object(torch, "tensor", tensor), copies:
        yield copies


def grouped_matmul(rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """The shapes of mindvl_ops.grouped_matmul; without a kernel for grouped rows, its implementation reads the sizes."""
    assert sizes.device == rows.device
    return rows.new_zeros(len(rows), weight.shape[2]) + rows.sum() + weight.sum()


@pytest.mark.parametrize("make", [smallest_config, smallest_qwen2_5_vl, smallest_qwen3_moe, smallest_deepseek_v3])
def test_a_pack_is_trained_without_a_wait(
    make: Callable[[], MindVLConfig], make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindvl_model.megatron import blocks, experts
    from mindvl_model.megatron import router as experts_router

    monkeypatch.setattr(experts.ops, "grouped_matmul", grouped_matmul)
    # megatron-core keeps these tensors for the whole process, and other tests are not on "meta".
    monkeypatch.setattr(experts_router.MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    monkeypatch.setattr(blocks.MTPLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))
    config = make()
    model = make_model(config).to("meta")
    segments = [random_segment(config, [(1, 4, 6), (1, 8, 4)], seed=1), random_segment(config, num_text=9, seed=2)]
    inputs = {
        name: value if name in ON_HOST else value.to("meta")
        for name, value in pack_segments(segments, padding=3).items()
    }
    with observed_copies() as copies:
        model(**inputs).backward()
    assert copies.blocking == 0
    assert copies.queued >= 3  # order, restored order and positions of patches


def test_a_blocking_copy_is_found() -> None:
    device = torch.empty(3, device="meta")
    with observed_copies() as copies:
        torch.ones(3).to("meta")
        torch.tensor([1, 2], device="meta")
        device.copy_(torch.ones(3))
        torch.ones(3).to("meta", non_blocking=True)
    assert (copies.blocking, copies.queued) == (3, 1)
