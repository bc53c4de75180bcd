# SPDX-License-Identifier: Apache-2.0
"""The segments of one packed sequence: their lengths, on the host; attention never crosses a segment border.

Made once per pack, before the first layer, and shared by all layers: what a backend derives from it (cumulative
lengths on a device, gather plans, masks, lists for a kernel) is computed once and kept with it.
"""

from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import OpsError
from .staging import to_device

R = TypeVar("R")


class Segments:
    """Segment lengths of a packed sequence of `total` tokens.

    A pack that is split (context parallelism, or a prefix that was computed before) has more keys than queries; then
    `key_lengths` counts the keys of each segment and `offsets` says at which key its first query lies.

    Args:
        lengths: Tokens of each segment, in order. Zero is allowed and means an empty segment.
        key_lengths: Keys of each segment; its queries themselves if not given.
        offsets: Key position of the first query of each segment; if not given, the queries are the last keys.

    Raises:
        OpsError: A negative length, lists of different size, queries without any key or outside of their keys.
    """

    def __init__(
        self,
        lengths: Iterable[int],
        key_lengths: Iterable[int] | None = None,
        offsets: Iterable[int] | None = None,
    ) -> None:
        self.lengths: tuple[int, ...] = tuple(int(length) for length in lengths)
        self.key_lengths: tuple[int, ...] = (
            self.lengths if key_lengths is None else tuple(int(length) for length in key_lengths)
        )
        _check_lengths(self.lengths, self.key_lengths)
        at_end = tuple(k - q for q, k in zip(self.lengths, self.key_lengths, strict=True))
        self.offsets: tuple[int, ...] = at_end if offsets is None else tuple(int(offset) for offset in offsets)
        if offsets is not None:
            _check_offsets(self.offsets, at_end)
        self.total: int = sum(self.lengths)
        self.key_total: int = sum(self.key_lengths)
        self.max_length: int = max(self.lengths, default=0)
        self.max_key_length: int = max(self.key_lengths, default=0)
        self.is_self: bool = self.key_lengths == self.lengths  # offsets are then 0
        self.at_end: bool = self.offsets == at_end  # the queries are the last keys of every segment
        self._derived: dict[Hashable, Any] = {}

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> "Segments":
        """From cumulative lengths `[num_segments + 1]`, first entry 0. Copies to the host: call it once per pack."""
        bounds = cu_seqlens.tolist()
        if not bounds or bounds[0] != 0:
            raise OpsError(
                f"Segments.from_cu_seqlens: cu_seqlens starts with {bounds[:1]}. The first entry must be 0, the last "
                "one the number of tokens."
            )
        return cls(end - start for start, end in pairwise(bounds))

    def cu_seqlens(self, device: torch.device | str) -> Tensor:
        """Cumulative lengths `[num_segments + 1]` int32 on `device`, made once per device."""
        return self._bounds("cu_seqlens", self.lengths, device)

    def key_cu_seqlens(self, device: torch.device | str) -> Tensor:
        """Cumulative key lengths `[num_segments + 1]` int32 on `device`, made once per device."""
        if self.is_self:
            return self.cu_seqlens(device)
        return self._bounds("key_cu_seqlens", self.key_lengths, device)

    def derived(self, key: Hashable, make: Callable[[], R]) -> R:
        """The value that `make` returns, computed at the first call with `key` and cached."""
        if key not in self._derived:
            self._derived[key] = make()
        value: R = self._derived[key]
        return value

    def _bounds(self, name: str, lengths: tuple[int, ...], device: torch.device | str) -> Tensor:
        device = torch.device(device)

        def make() -> Tensor:
            return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)

        return self.derived((name, device), make)

    def __len__(self) -> int:
        return len(self.lengths)

    def _identity(self) -> tuple[tuple[int, ...], ...]:
        return self.lengths, self.key_lengths, self.offsets

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segments) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        if self.is_self:
            return f"Segments({self.lengths})"
        return f"Segments({self.lengths}, key_lengths={self.key_lengths}, offsets={self.offsets})"


def _check_lengths(lengths: tuple[int, ...], key_lengths: tuple[int, ...]) -> None:
    if any(length < 0 for length in (*lengths, *key_lengths)):
        raise OpsError(
            f"Segments.lengths: segment length {min(*lengths, *key_lengths)} is negative. Check that cu_seqlens never "
            "decreases."
        )
    if len(lengths) != len(key_lengths):
        raise OpsError(
            f"Segments: {len(lengths)} lengths, {len(key_lengths)} key lengths. Give one of each for every segment."
        )
    for number, (queries, keys) in enumerate(zip(lengths, key_lengths, strict=True)):
        if queries and not keys:
            raise OpsError(
                f"Segments: segment {number}: {queries} queries have no key. Leave out the segment or give it keys."
            )


def _check_offsets(offsets: tuple[int, ...], at_end: tuple[int, ...]) -> None:
    if len(offsets) != len(at_end):
        raise OpsError(f"Segments.offsets: {len(offsets)} offsets for {len(at_end)} segments. Give one for each.")
    for number, (offset, last) in enumerate(zip(offsets, at_end, strict=True)):
        if not 0 <= offset <= last:
            raise OpsError(
                f"Segments.offsets: segment {number}: offset {offset} is outside of 0 to {last}. All queries of a "
                "segment must lie among its keys."
            )
