# SPDX-License-Identifier: Apache-2.0
"""What training needs of data and model; both match these Protocols without importing them."""

from typing import Any, Protocol, Self

import torch
from torch import Tensor


class Batch(Protocol):
    """One packed row."""

    @property
    def num_label_tokens(self) -> int:
        """Learned tokens of the row."""
        ...

    def to(self, device: torch.device) -> Self:
        """The same row with its tensors on a device."""
        ...

    def model_inputs(self) -> dict[str, Any]:
        """input_ids, labels, position_ids, cu_seqlens, max_seqlen, pixel_values, image_grid_thw."""
        ...


class BatchSource(Protocol):
    """Rows of this data-parallel rank, in the order of the plan."""

    def __next__(self) -> Batch:
        """The next row."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Enough to continue with the very next step."""
        ...

    def load_state_dict(self, state: dict[str, Any], *, accept_change: str | None = None) -> None:
        """Continue from a state of the same recipe and data; or of other data, which somebody accepts."""
        ...


class TrainModel(Protocol):
    """A model, or one pipeline stage of it."""

    def __call__(self, **inputs: Any) -> Tensor:
        """Summed loss of a row, scalar float32 (hidden states on all but the last stage)."""
        ...
