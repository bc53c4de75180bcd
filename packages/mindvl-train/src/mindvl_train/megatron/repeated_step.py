# SPDX-License-Identifier: Apache-2.0
"""A step whose expert messages overflowed is computed again with exact sizes, as if it were the first time.

Used by step.py, after the totals of the step are known. Gradient buffers are zeroed by the step itself, and dropout masks
depend on the step and not on the pass, so losses and router counts are all that is left of the passes before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from mindvl_model.megatron.router import routers


def expert_overflow(models: Sequence[torch.nn.Module]) -> Tensor | None:
    """Whether rows of tokens did not fit into expert messages of fixed size, scalar on the device; None: they always fit."""
    found = [flag for messages in _expert_messages(models) if (flag := messages.overflow()) is not None]
    return torch.stack(found).any() if found else None


@contextmanager
def repeated_step(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Forget the router counts and losses that were not taken yet; in the block, expert messages have their exact size."""
    for model in models:
        inner: Any = unwrap_model(model)
        inner.take_segment_losses()
        inner.take_mtp_loss()
        for router in routers(inner):
            router.take_tally()
    for messages in _expert_messages(models):
        messages.discard()
        messages.is_exact = True
    try:
        yield
    finally:
        for messages in _expert_messages(models):
            messages.is_exact = messages.blocks is None


def _expert_messages(models: Sequence[torch.nn.Module]) -> list[Any]:
    found = [unwrap_model(model).language.expert_messages for model in models]
    return [messages for messages in found if messages is not None]
