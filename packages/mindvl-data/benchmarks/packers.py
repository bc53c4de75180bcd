# SPDX-License-Identifier: Apache-2.0
"""Simple implementations of other packing algorithms, with which the packing benchmark compares.

Used by packing.py. They consider only tokens, like the loaders that use them; first fit can keep a visual limit. A packer
takes lengths in the order of the stream and yields packed sequences in the order in which they are closed, each with the
number of samples read.
"""

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

Closed = tuple[list[int], int]  # samples of a pack, number of samples read when it was closed


def first_fit(
    lengths: list[int], capacity: int, _: int, *, visual: list[int] | None = None, limit: int = 0
) -> Iterator[Closed]:
    """Put each sample into the oldest pack in which it fits; close a pack when no sample can fit any more.

    The number of open packs is unbounded, so that the packing efficiency is high and waits are long. With `visual`, a
    pack has at most `limit` visual tokens, except a single larger sample.
    """
    shortest = min(lengths)
    costs = visual or [0] * len(lengths)
    free, left = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    packs: list[list[int]] = []
    start = 0  # packs before it are closed
    for number, length in enumerate(lengths):
        fits = (free[start : len(packs)] >= length) & (left[start : len(packs)] >= costs[number])
        position = start + int(fits.argmax()) if fits.any() else len(packs)
        if position == len(packs):
            packs.append([])
            free[position], left[position] = capacity, limit
        packs[position].append(number)
        free[position] -= length
        left[position] = max(0, left[position] - costs[number])
        if free[position] < shortest:
            yield packs[position], number + 1
            free[position], packs[position] = -1, []
            while start < len(packs) and free[start] < 0:
                start += 1
    yield from ((pack, len(lengths)) for pack in packs if pack)


def first_fit_decreasing(lengths: list[int], capacity: int, buffer_size: int) -> Iterator[Closed]:
    """Pack one buffer at a time, longest sample first, each into the first pack in which it fits."""
    for start in range(0, len(lengths), buffer_size):
        stop = min(start + buffer_size, len(lengths))
        packs: list[list[int]] = []
        free: list[int] = []
        for number in sorted(range(start, stop), key=lambda n: -lengths[n]):
            position = next((position for position, room in enumerate(free) if room >= lengths[number]), None)
            if position is None:
                position = len(packs)
                packs.append([])
                free.append(capacity)
            packs[position].append(number)
            free[position] -= lengths[number]
        yield from ((pack, stop) for pack in packs)


def greedy_knapsack(lengths: list[int], capacity: int, buffer_size: int) -> Iterator[Closed]:
    """Pack one buffer at a time; add the largest sample that fits until none does (as in Megatron's examples)."""
    for start in range(0, len(lengths), buffer_size):
        stop = min(start + buffer_size, len(lengths))
        waiting = sorted((lengths[number], number) for number in range(start, stop))
        while waiting:
            pack, room = [], capacity
            while (position := bisect_right(waiting, (room, stop))) > 0:
                length, number = waiting.pop(position - 1)
                pack.append(number)
                room -= length
            yield pack, stop


RIVALS = {
    "first fit": first_fit,
    "first fit decreasing": first_fit_decreasing,
    "greedy knapsack": greedy_knapsack,
}
