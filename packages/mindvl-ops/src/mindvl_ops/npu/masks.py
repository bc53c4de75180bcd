# SPDX-License-Identifier: Apache-2.0
"""How a packed sequence is described to the fusion-attention kernel: sparse mode, shared mask, lengths.

The kernel takes the mask of a whole pack as one triangle of 2048 x 2048, whatever the lengths are, and a sparse mode
that says what the triangle means in every segment. Source: NPU_CONTRACTS, section 2, and the paper's section 3.1.4
(mask compression). Nothing here needs torch_npu.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..attention import Window
from ..errors import OpsError
from ..segments import Segments

MASK_SIDE = 2048
MAX_SEGMENTS = 2048  # documented for one call in layout TND; more segments are spread over several calls
MAX_TOKENS = 2**20  # of one call
NO_LIMIT = 2**31 - 1

_shared: dict[torch.device, Tensor] = {}


@dataclass(frozen=True, kw_only=True)
class Description:
    """The arguments of one kernel call that define which query attends to which key; made once per pack and mask."""

    query_range: tuple[int, int]  # first and one after the last query of this call
    key_range: tuple[int, int]
    sparse_mode: int
    pre_tokens: int = NO_LIMIT
    next_tokens: int = NO_LIMIT
    masked: bool  # whether the shared mask is given
    query_ends: list[int]  # cumulative, without a leading 0, as Python ints: the kernel reads them on the host
    key_ends: list[int]


def describe(segments: Segments, *, causal: bool, window: Window | None) -> tuple[Description, ...]:
    """The kernel calls that a pack needs, almost always one; cached with its segments.

    Segments do not see each other, so a pack with more segments than one call takes is split between two segments. Segments
    without queries at either end of a call are left out together with their keys: which segment modes 7 and 8 treat as
    the last or the first is decided by the kernel among those that are not empty.

    Sparse modes: 0 all tokens of the segment; 2 causal from the first key on; 3 causal up to the last key; 4 a band;
    7 as 3, but the last segment ends before its keys do; 8 as 2, but the first segment began before this pack.

    Raises:
        OpsError: The kernel has no mode for these offsets.
    """
    return segments.derived(("npu", causal, window), lambda: _describe(segments, causal, window))


def shared_mask(device: torch.device) -> Tensor:
    """The one mask of a device, `[2048, 2048]` bool, True above the diagonal; 4 MiB, made once per process."""
    mask = _shared.get(device)
    if mask is None:
        mask = torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.bool, device=device).triu_(1)
        if type(mask) is Tensor:  # a fake tensor must not outlive its mode
            _shared[device] = mask
    return mask


def _describe(segments: Segments, causal: bool, window: Window | None) -> tuple[Description, ...]:
    calls: list[Description] = []
    query_start, key_start, first = 0, 0, 0
    if not segments.total:
        return ()
    for last in _cuts(segments):
        calls.append(_describe_call(segments, range(first, last), (query_start, key_start), causal, window))
        query_start += sum(segments.lengths[first:last])
        key_start += sum(segments.key_lengths[first:last])
        first = last
    return tuple(calls)


def _cuts(segments: Segments) -> list[int]:
    """One after the last segment of each call; each call has queries."""
    cuts, size, queries, keys = [], 0, 0, 0
    for number, (num_queries, num_keys) in enumerate(zip(segments.lengths, segments.key_lengths, strict=True)):
        is_full = size == MAX_SEGMENTS or max(queries + num_queries, keys + num_keys) > MAX_TOKENS
        if is_full and queries:
            cuts.append(number)
            size = queries = keys = 0
        # Segments before the first query of a call and segments that are empty do not count: they are left out.
        if num_queries or (queries and num_keys):
            size, queries, keys = size + 1, queries + num_queries, keys + num_keys
    return [*cuts, len(segments)] if queries else [*cuts[:-1], len(segments)]


def _describe_call(
    segments: Segments, numbers: range, starts: tuple[int, int], causal: bool, window: Window | None
) -> Description:
    filled = [i for i in numbers if segments.lengths[i]]
    key_start = starts[1] + sum(segments.key_lengths[numbers.start : filled[0]])
    kept = [i for i in range(filled[0], filled[-1] + 1) if segments.lengths[i] or segments.key_lengths[i]]
    query_ends = list(accumulate(segments.lengths[i] for i in kept))
    key_ends = list(accumulate(segments.key_lengths[i] for i in kept))
    left, right = window or (-1, -1)
    if causal:
        right = 0
    mode, pre, after = 0, NO_LIMIT, NO_LIMIT
    rows = [(segments.offsets[i], segments.key_lengths[i] - segments.lengths[i]) for i in filled]
    if left >= 0 or right > 0:
        mode, pre, after = _band(rows, left, right)
    elif right == 0:
        mode, after = _causal(rows)
    return Description(
        query_range=(starts[0], starts[0] + query_ends[-1]),
        key_range=(key_start, key_start + key_ends[-1]),
        sparse_mode=mode,
        pre_tokens=pre,
        next_tokens=after,
        masked=mode != 0,
        query_ends=query_ends,
        key_ends=key_ends,
    )


def _band(rows: list[tuple[int, int]], left: int, right: int) -> tuple[int, int, int]:
    """Mode 4 counts from the last key: a common distance from it is absorbed by the two sides."""
    shifts = {offset - last for offset, last in rows}
    if len(shifts) > 1:
        raise OpsError(
            f"npu attention: windows over segments whose queries end {sorted(-shift for shift in shifts)} tokens "
            "before their keys. The kernel has one band for all segments; split the pack elsewhere."
        )
    shift = shifts.pop() if shifts else 0
    return 4, NO_LIMIT if left < 0 else left - shift, NO_LIMIT if right < 0 else right + shift


def _causal(rows: list[tuple[int, int]]) -> tuple[int, int]:
    """Mode and `next_tokens` for rows of (key position of the first query, the same if the queries were the last)."""
    from_start = [offset == 0 for offset, _ in rows]
    to_end = [offset == last for offset, last in rows]
    if all(from_start):
        return 2, NO_LIMIT
    if all(to_end):
        return 3, NO_LIMIT
    if all(to_end[:-1]):
        return 7, rows[-1][0] - rows[-1][1]
    if all(from_start[1:]):
        return 8, rows[0][0] - rows[0][1]
    raise OpsError(
        f"npu attention: causal: queries start at keys {[offset for offset, _ in rows]}, "
        f"{[last - offset for offset, last in rows]} before the end. The kernel can cut only the first or the last "
        "segment; split the pack elsewhere."
    )
