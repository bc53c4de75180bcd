# SPDX-License-Identifier: Apache-2.0
"""Lengths of the segments of one packed row, on the host.

Made once per row, before the first layer, and shared by all layers: what a backend derives from it (cumulative
lengths on a device, gather plans, masks) is computed once and kept with it.
"""

from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import OpsError

R = TypeVar("R")


class Segments:
    """Segment lengths of a packed row of `total` tokens.

    Args:
        lengths: Tokens of each segment, in order. Zero is allowed and means an empty segment.
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        self.lengths: tuple[int, ...] = tuple(int(length) for length in lengths)
        if any(length < 0 for length in self.lengths):
            raise OpsError(
                f"segment length {min(self.lengths)} is negative. Segments.lengths. Check that cu_seqlens "
                "never decreases."
            )
        self.total: int = sum(self.lengths)
        self.max_length: int = max(self.lengths, default=0)
        self._derived: dict[Hashable, Any] = {}

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> "Segments":
        """From cumulative lengths `[num_segments + 1]`, first entry 0. Copies to the host: call it once per row."""
        bounds = cu_seqlens.tolist()
        if not bounds or bounds[0] != 0:
            raise OpsError(
                f"cu_seqlens starts with {bounds[:1]}. Segments.from_cu_seqlens. The first entry must be "
                "0, the last one the number of tokens."
            )
        return cls(end - start for start, end in pairwise(bounds))

    def cu_seqlens(self, device: torch.device | str) -> Tensor:
        """Cumulative lengths `[num_segments + 1]` int32 on `device`, made once per device."""
        device = torch.device(device)

        def make() -> Tensor:
            return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=device)

        return self.derived(("cu_seqlens", device), make)

    def derived(self, key: Hashable, make: Callable[[], R]) -> R:
        """What `make` returns, computed at the first call with `key` and kept."""
        if key not in self._derived:
            self._derived[key] = make()
        value: R = self._derived[key]
        return value

    def __len__(self) -> int:
        return len(self.lengths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segments) and self.lengths == other.lengths

    def __hash__(self) -> int:
        return hash(self.lengths)

    def __repr__(self) -> str:
        return f"Segments({self.lengths})"
