# SPDX-License-Identifier: Apache-2.0
"""The next pack is copied before the current one is computed, and the computation waits for its own copy only."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mindvl_train.staging import staged


class _Device:
    """The module of an accelerator, which records what is queued and for which stream."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "main"
        with FakeTensorMode():
            self.tensor = torch.zeros(4).to("cuda")

    def Stream(self, device: torch.device) -> Any:  # noqa: N802
        return SimpleNamespace(record_event=lambda: f"event {len(self.log)}")

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.now = "side"
        yield
        self.now = "main"

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_event=lambda event: self.log.append(f"{self.now} waits for {event}"))


class _Pack:
    def __init__(self, name: str, device: _Device) -> None:
        self.name, self.device = name, device
        self.inputs: dict[str, Any] = {"cu_seqlens": torch.zeros(2), "max_seqlen": 3}

    def to(self, device: torch.device) -> "_Pack":
        self.device.log.append(f"{self.device.now} copies {self.name}")
        moved = _Pack(self.name, self.device)
        moved.inputs["input_ids"] = self.device.tensor
        return moved

    def model_inputs(self) -> dict[str, Any]:
        return self.inputs


def test_on_a_cpu_packs_come_one_by_one() -> None:
    device = _Device()
    packs = staged([_Pack(name, device) for name in "ab"], torch.device("cpu"))  # type: ignore[list-item]
    next(packs)
    assert device.log == ["main copies a"]


def test_a_pack_is_copied_on_a_side_stream_while_the_one_before_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    device, kept = _Device(), []
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: kept.append(self.shape))
    for pack in staged([_Pack(name, device) for name in "abc"], torch.device("cuda")):  # type: ignore[list-item]
        device.log.append(f"main computes {pack.name}")  # type: ignore[attr-defined]
    assert device.log == [
        "side copies a",
        "side copies b",
        "main waits for event 1",
        "main computes a",
        "side copies c",
        "main waits for event 2",
        "main computes b",
        "main waits for event 5",
        "main computes c",
    ]
    assert kept == [torch.Size([4])] * 3  # the inputs on the device, not those on the host


def test_a_pack_that_the_model_released_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    packs = staged([_Pack(name, device) for name in "ab"], torch.device("cuda"))  # type: ignore[list-item]
    released = weakref.ref(next(packs))
    assert released() is None
