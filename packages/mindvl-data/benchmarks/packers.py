# SPDX-License-Identifier: Apache-2.0
"""What others do to fill rows, written plainly: the rivals of the packing benchmark.

Used by packing.py. All of them look at tokens alone, as the loaders do that use them. A packer takes lengths in the
order of the stream and gives rows in the order in which they are closed, each with how much of the stream had been
read by then.
"""

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

Closed = tuple[list[int], int]  # samples of a row, samples read when it was closed


def first_fit(lengths: list[int], capacity: int, _: int) -> Iterator[Closed]:
    """Each sample goes into the oldest row with room; a row is closed when nothing can fit any more.

    Rows that never get full stay open to the end, without bound: this is what makes its fill good and its waits long.
    """
    shortest = min(lengths)
    free = np.zeros(len(lengths), np.int64)
    rows: list[list[int]] = []
    start = 0  # rows before it are closed
    for number, length in enumerate(lengths):
        place = start + int((free[start : len(rows)] >= length).argmax()) if len(rows) > start else 0
        if len(rows) == start or free[place] < length:
            place = len(rows)
            rows.append([])
            free[place] = capacity
        rows[place].append(number)
        free[place] -= length
        if free[place] < shortest:
            yield rows[place], number + 1
            free[place], rows[place] = -1, []
            while start < len(rows) and free[start] < 0:
                start += 1
    yield from ((row, len(lengths)) for row in rows if row)


def first_fit_decreasing(lengths: list[int], capacity: int, buffer_size: int) -> Iterator[Closed]:
    """The whole buffer, longest first, each into the first row with room; then the next buffer."""
    for start in range(0, len(lengths), buffer_size):
        stop = min(start + buffer_size, len(lengths))
        rows: list[list[int]] = []
        free: list[int] = []
        for number in sorted(range(start, stop), key=lambda n: -lengths[n]):
            place = next((place for place, room in enumerate(free) if room >= lengths[number]), None)
            if place is None:
                place = len(rows)
                rows.append([])
                free.append(capacity)
            rows[place].append(number)
            free[place] -= lengths[number]
        yield from ((row, stop) for row in rows)


def greedy_knapsack(lengths: list[int], capacity: int, buffer_size: int) -> Iterator[Closed]:
    """The whole buffer, row by row: the largest sample that still fits, until none does (as Megatron's examples)."""
    for start in range(0, len(lengths), buffer_size):
        stop = min(start + buffer_size, len(lengths))
        waiting = sorted((lengths[number], number) for number in range(start, stop))
        while waiting:
            row, room = [], capacity
            while (place := bisect_right(waiting, (room, stop))) > 0:
                length, number = waiting.pop(place - 1)
                row.append(number)
                room -= length
            yield row, stop


RIVALS = {
    "first fit": first_fit,
    "first fit decreasing": first_fit_decreasing,
    "greedy knapsack": greedy_knapsack,
}
