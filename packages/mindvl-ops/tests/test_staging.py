# SPDX-License-Identifier: Apache-2.0
"""Host tensors reach the device through pinned memory and without a wait; on a CPU nothing is copied."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mindvl_ops import Segments, to_device


class _Copies(TorchDispatchMode):
    """Records whether each copy to another device is queued."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::_to_copy":
            self.queued.append((kwargs or {}).get("non_blocking", False))
        return func(*args, **(kwargs or {}))


def test_a_tensor_that_stays_on_the_cpu_is_not_copied() -> None:
    host = torch.arange(5)
    assert to_device(host, "cpu") is host


def test_a_copy_to_an_accelerator_is_queued_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.shape) or self)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with FakeTensorMode(allow_non_fake_inputs=True), _Copies() as copies:
        moved = to_device(torch.arange(5), "cuda")
    assert moved.device.type == "cuda"
    assert (pinned, copies.queued) == ([torch.Size([5])], [True])


def test_cumulative_lengths_are_queued_once_per_device() -> None:
    segments = Segments((3, 4))
    with _Copies() as copies:
        first = segments.cu_seqlens("meta")
        assert segments.cu_seqlens("meta") is first
    assert copies.queued == [True]
    assert segments.cu_seqlens("cpu").tolist() == [0, 3, 7]
