# SPDX-License-Identifier: Apache-2.0
"""Copies of packs to the device that overlap with computation: the next pack is copied while one is computed.

Comes after the loader, which builds packs in pinned memory, and before the forward pass. At most two packs of a model
chunk are on the device at a time.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mindvl_train.interfaces import Batch

_WITH_STREAMS = ("cuda", "npu")


def staged(packs: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the packs on a device, in order; on an accelerator they are copied on a side stream, one ahead.

    The current stream waits for the copy of a pack before it uses it; the host does not wait if the pack is in pinned
    memory.
    """
    if device.type not in _WITH_STREAMS:
        for pack in packs:
            yield pack.to(device)
        return
    module: Any = torch.get_device_module(device)
    stream = module.Stream(device)

    def copy(pack: Batch) -> tuple[Batch, Any]:
        with module.stream(stream):
            moved = pack.to(device)
            return moved, stream.record_event()

    def received(pack: Batch, event: Any) -> Batch:
        current = module.current_stream(device)
        current.wait_event(event)
        for value in pack.model_inputs().values():
            if isinstance(value, torch.Tensor) and value.device.type == device.type:
                # Its memory belongs to the side stream and must not be reused there before this stream has read it.
                value.record_stream(current)
        return pack

    copied = (copy(pack) for pack in packs)
    ahead = next(copied, None)
    while ahead is not None:
        this, ahead = [ahead], next(copied, None)
        yield received(*this.pop())  # no reference is kept here, so that the model frees the pack
