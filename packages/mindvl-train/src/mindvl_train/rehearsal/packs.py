# SPDX-License-Identifier: Apache-2.0
"""The data of a rehearsal: packs of one size with random content, with the interface of the loader.

Replaces mindvl_data.Loader in the process of a rank; nothing is read from storage.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from mindvl_data import Batch
from mindvl_data.types import SampleReference
from mindvl_model import MindVLConfig
from mindvl_train.layout_search.measure import RandomBatch
from mindvl_train.layout_search.packs import Pack

_ON_HOST = ("cu_seqlens", "image_grid_thw", "video_grid_thw", "loss_positions")


class CopiedBatch(Batch):
    """A pack that is copied also to a CPU, as to a device; without the copy a measurement would not count it."""

    def to(self, device: torch.device | str) -> Self:
        """A copy, except tensors that the model reads on the host."""
        moved: dict[str, Any] = {
            each.name: value.to(device, copy=True)
            for each in fields(self)
            if each.name not in _ON_HOST and isinstance(value := getattr(self, each.name), Tensor)
        }
        return replace(self, **moved)


@dataclass
class Packs:
    """An endless source of one pack.

    Args:
        source: Name of the data source that the samples carry.
        with_pixels: False on pipeline stages after the first, which have no vision encoder.
    """

    pack: Pack
    model: MindVLConfig
    source: str
    with_pixels: bool
    copied: bool

    def __post_init__(self) -> None:
        inputs = RandomBatch.of(self.pack, self.model).inputs
        lengths = self.pack.segments
        pixels = inputs["pixel_values"]
        dim = pixels.shape[1]
        kind = CopiedBatch if self.copied else Batch
        self._batch = kind(
            **{name: value for name, value in inputs.items() if name != "pixel_values"},
            pixel_values=pixels if self.with_pixels else pixels.new_empty(0, dim),
            pixel_values_videos=pixels.new_empty(0, 2 * dim),
            video_grid_thw=torch.empty(0, 3, dtype=torch.int64),
            samples=tuple(
                SampleReference(source=self.source, epoch=0, shard="", sample_index=number, key="", length=length)
                for number, length in enumerate(lengths)
            ),
            step=0,
        )

    def __next__(self) -> Batch:
        """The pack."""
        return replace(self._batch)

    def is_used_up(self) -> bool:
        """Never."""
        return False

    def rebuild(self, batch: Any, failed: Sequence[bool]) -> Batch:
        """No sample fails."""
        raise AssertionError("no sample of a rehearsal fails")

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank."""
        return {"checksum": "rehearsal"}

    def load_state_dict(self, state: dict[str, Any], **options: Any) -> None:
        """Nothing to load."""

    def report(self) -> dict[str, Any]:
        """No statistics."""
        return {}

    def close(self) -> None:
        """Nothing is open."""
