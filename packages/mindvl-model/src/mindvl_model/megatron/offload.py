# SPDX-License-Identifier: Apache-2.0
"""Activation offload: what chosen layers save for backward is kept in pinned host memory between forward and backward.

Installed by model.py on the first layers of a chunk, whose activations are kept longest. Copies run on a side stream: to
the host while later layers compute, and back while the backward pass of the layer after them computes. On a CPU, where
there is one memory and one queue, the same code copies at once. Not run on a device.
"""

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mindvl_model.parallel_config import SMALLEST_OFFLOADED_BYTES


class ActivationOffload:
    """Keeps the saved tensors of layers in host memory.

    Stays on the device: parameters and their views, the tensors of the packed sequence that all layers share, integers
    and masks, and tensors of less than `smallest_bytes`.

    Args:
        smallest_bytes: Size of the smallest tensor that is copied.
    """

    def __init__(self, smallest_bytes: int = SMALLEST_OFFLOADED_BYTES) -> None:
        self.smallest_bytes = smallest_bytes
        self.host_bytes = 0  # in host memory now
        self.peak_host_bytes = 0
        self._queue: _Queue | None = None  # made with the first tensor, whose device it serves
        self._layer: _SavedLayer | None = None  # the one that is computed now
        self._before: _SavedLayer | None = None  # the one computed before it, in the same pass
        self._context: Any = None

    def install(self, layers: Iterable[nn.Module]) -> None:
        """Offload the saved tensors of these layers, which are computed in this order."""
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._enter(is_first=number == 0), with_kwargs=True)
            layer.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *, is_first: bool) -> Any:
        def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.is_grad_enabled():
                return
            shared = [value for value in vars(kwargs["packed_seq_params"]).values() if isinstance(value, Tensor)]
            stays = {_address(tensor) for tensor in (*layer.parameters(), *shared)}
            self._layer = _SavedLayer(self, stays, None if is_first else self._before)
            self._context = saved_tensors_hooks(self._layer.pack, _unpack)
            self._context.__enter__()

        return enter

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._layer is None:
            return
        self._context.__exit__()
        self._layer.finish()
        self._before, self._layer, self._context = self._layer, None, None

    def queue_of(self, tensor: Tensor) -> "_Queue":
        """The side stream of the tensor's device."""
        if self._queue is None:
            self._queue = _Queue(tensor.device)
        return self._queue

    def add(self, num_bytes: int) -> None:
        """Count bytes in host memory."""
        self.host_bytes += num_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)


class _Queue:
    """The side stream for copies; on a CPU and on devices without streams, the order of the program."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device) if device.type in ("cuda", "npu") else None
        self._stream = self._module.Stream(device) if self._module else None
        self.device = device

    def beside(self) -> Any:
        """Run the body on the side stream."""
        return self._module.stream(self._stream) if self._module else nullcontext()

    def follow(self) -> None:
        """Let the side stream wait for what has been queued on the current stream."""
        if self._module:
            self._stream.wait_stream(self._module.current_stream(self.device))  # type: ignore[union-attr]

    def reads(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor until the side stream has read it."""
        if self._module:
            tensor.record_stream(self._stream)  # type: ignore[arg-type]

    def event(self) -> Any:
        """An event after what has been queued on the side stream."""
        return self._stream.record_event() if self._stream else None

    def deliver(self, tensor: Tensor, event: Any) -> None:
        """Let the current stream use a tensor of the side stream after the event."""
        if self._module:
            current = self._module.current_stream(self.device)
            current.wait_event(event)
            tensor.record_stream(current)


class _SavedTensor:
    """One tensor in host memory. Several places of the graph may have saved it."""

    def __init__(self, layer: "_SavedLayer", tensor: Tensor) -> None:
        self.layer, self.device = layer, tensor.device
        self.num_uses = 0  # places that have not read it since it was fetched
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type in ("cuda", "npu"))
        self.fetched: Tensor | None = None
        self.event: Any = None
        layer.offload.add(self.host.nbytes)

    def fetch(self) -> None:
        """Start the copy back to the device."""
        queue = self.layer.offload.queue_of(self.host)
        with queue.beside():
            self.fetched = self.host.to(self.device, non_blocking=True)
            self.event = queue.event()

    def __del__(self) -> None:
        self.layer.offload.add(-self.host.nbytes)


class _SavedLayer:
    """The saved tensors of one layer and one packed sequence."""

    def __init__(self, offload: ActivationOffload, stays: set[int], before: "_SavedLayer | None") -> None:
        self.offload, self._stays, self._before = offload, stays, before
        # Not owned: the graph owns the tensors, so that host memory is freed with it.
        self._tensors: list[weakref.ref[_SavedTensor]] = []
        self._known: dict[tuple[Any, ...], tuple[Tensor, _SavedTensor]] = {}  # during forward

    def pack(self, tensor: Tensor) -> "Tensor | _SavedTensor":
        """Start the copy to the host; returns the tensor itself if it stays on the device."""
        if tensor.nbytes < self.offload.smallest_bytes or not tensor.is_floating_point():
            return tensor
        if _address(tensor) in self._stays:
            return tensor
        key = (_address(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in self._known:
            saved, queue = _SavedTensor(self, tensor), self.offload.queue_of(tensor)
            value = tensor.detach()
            queue.follow()
            with queue.beside():
                saved.host.copy_(value, non_blocking=True)
            queue.reads(value)
            self._tensors.append(weakref.ref(saved))
            self._known[key] = value, saved  # holds the memory, so that no other tensor gets its address
        saved = self._known[key][1]
        saved.num_uses += 1
        return saved

    def finish(self) -> None:
        """Release the device tensors; called after the forward pass of the layer."""
        self._known.clear()

    def fetch(self) -> None:
        """Start the copies of all tensors back to the device; once."""
        tensors, self._tensors = self._tensors, []
        for reference in tensors:
            saved = reference()
            if saved is not None:
                saved.fetch()

    def fetch_before(self) -> None:
        """Start the copies of the layer whose backward pass comes next."""
        if self._before is not None:
            self._before.fetch()
            self._before = None


def _unpack(saved: "Tensor | _SavedTensor") -> Tensor:
    """The tensor on its device. Its layer and the one before it are fetched with the first tensor of the layer."""
    if isinstance(saved, Tensor):
        return saved
    saved.layer.fetch()
    saved.layer.fetch_before()
    if saved.fetched is None:  # a second backward pass through the same graph
        saved.fetch()
    tensor = saved.fetched
    assert tensor is not None
    saved.layer.offload.queue_of(tensor).deliver(tensor, saved.event)
    saved.num_uses -= 1
    if saved.num_uses <= 0:
        saved.fetched = None
    return tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # of the storage object: fake tensors have no data
