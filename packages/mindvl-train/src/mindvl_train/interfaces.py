# SPDX-License-Identifier: Apache-2.0
"""Protocols that training requires of data and model; both packages match them without importing them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import torch


class SampleReference(Protocol):
    """The origin of one sample of a pack."""

    @property
    def source(self) -> str:
        """Name of the source."""

    @property
    def epoch(self) -> int:
        """Number of completed passes over the source before this sample."""

    @property
    def shard(self) -> str:
        """Name of the shard."""

    @property
    def sample_index(self) -> int:
        """Index in the shard."""

    @property
    def key(self) -> str:
        """Key of the sample."""

    @property
    def num_images(self) -> int:
        """Number of images."""

    @property
    def num_videos(self) -> int:
        """Number of videos."""

    @property
    def failed(self) -> bool:
        """Whether it could not be read or decoded, so that a placeholder without loss tokens replaces it."""


class Batch(Protocol):
    """One packed sequence (pack): the samples of one microbatch."""

    @property
    def samples(self) -> Sequence[SampleReference]:
        """The samples in order, without the padding."""

    @property
    def num_loss_tokens(self) -> int:
        """Loss tokens of the pack."""

    def to(self, device: torch.device) -> Self:
        """The same pack with its tensors on a device."""

    def model_inputs(self) -> dict[str, Any]:
        """input_ids, labels, position_ids, cu_seqlens, max_seqlen, pixel_values, image_grid_thw, loss_positions."""


class BatchSource(Protocol):
    """Packs of this data-parallel rank, in data order."""

    def __next__(self) -> Batch:
        """The next pack."""

    def is_used_up(self) -> bool:
        """Whether no pack is left; the same value on every rank after the last pack of a step."""

    def rebuild(self, batch: Any, failed: Sequence[bool]) -> Batch:
        """Build a pack of the newest step again, with placeholders for failed samples."""

    def state_dict(self) -> dict[str, Any]:
        """State to continue with the next step."""

    def load_state_dict(
        self,
        state: dict[str, Any],
        *,
        accept_change: str | None = None,
        parent_log: Path | None = None,
        where: str = "checkpoint",
    ) -> None:
        """Continue from a state of the same recipe and data.

        Args:
            accept_change: User who accepts that the data has changed; None: changed data is refused.
            parent_log: Audit log of the run that saved the state.
            where: Place of the state in messages, such as its file.
        """
