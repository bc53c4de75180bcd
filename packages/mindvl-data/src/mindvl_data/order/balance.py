# SPDX-License-Identifier: Apache-2.0
"""The balance window: distributes the packs of a few steps so that parallel ranks have equal visual loads.

Comes after packing, before packs are assigned to ranks. Packs are sorted by visual load and split into groups of packs
that run in parallel. Each round of groups is distributed over the steps, the heaviest group to the lightest step; then
packs within groups are swapped until every slot of the groups has nearly the same sum over a step. The group size is
part of the recipe, so the packs of a step do not depend on the number of ranks. The arithmetic uses integers only, so
the order is the same on every machine.
"""

import numpy as np
from numpy.typing import NDArray

_SWAPS_PER_SLOT = 8  # limit; about two suffice

Loads = NDArray[np.int64]
Swap = tuple[int, int, int, list[int]]  # (gain, slot, other slot, groups in which they are swapped)


def balance_order(loads: Loads, *, global_batch_size: int, width: int) -> NDArray[np.int64]:
    """The order of the packs of a window in which ranks that synchronize have nearly equal loads.

    Args:
        loads: [num_steps * global_batch_size] patches of each pack.
        width: Packs that run in parallel; the largest divisor of `global_batch_size` up to this value is used.

    Returns:
        [num_steps * global_batch_size] positions in `loads`, step by step. Assigned round-robin to `width` ranks, or a
        divisor of it, ranks have nearly equal sums in each step and nearly equal loads in each microbatch. The balance
        is weaker for other numbers of ranks and for one or two packs per rank and step: an imbalance of 11 % was
        measured for 8 packs on 4 ranks. A step of a single group holds packs of similar load, so that steps differ;
        from four groups on steps have similar loads.
    """
    num_steps = len(loads) // global_batch_size
    width = max(d for d in range(1, min(width, global_batch_size) + 1) if global_batch_size % d == 0)
    # If a step is large enough, pairs of neighbours stay together, which also balances twice as many ranks.
    together = 2 if global_batch_size % (2 * width) == 0 and global_batch_size >= 8 * width else 1
    by_load = np.argsort(-loads, kind="stable").reshape(-1, num_steps, together * width)
    steps = np.empty((num_steps, len(by_load), together * width), np.int64)
    sums = np.zeros(num_steps, np.int64)
    group_sums = loads[by_load].sum(axis=2)  # [rounds, num_steps], heaviest first
    for number in np.argsort(group_sums[:, -1] - group_sums[:, 0], kind="stable"):  # rounds that differ most first
        lightest_first = np.argsort(sums, kind="stable")
        steps[lightest_first, number] = by_load[number]
        sums[lightest_first] += group_sums[number]
    # Reverse every other round, so that each of two neighbours comes first equally often.
    steps[:, 1::2] = steps[:, 1::2, ::-1].copy()
    return np.concatenate([_even_slots(step.reshape(-1, width), loads).reshape(-1) for step in steps])


def _even_slots(groups: NDArray[np.int64], loads: Loads) -> NDArray[np.int64]:
    """Swap packs within groups until no swap makes the sums of the slots more equal.

    Args:
        groups: [groups of a step, width] positions in `loads`; changed in place.
    """
    load = loads[groups]
    pairs = np.triu_indices(len(groups))
    for _ in range(_SWAPS_PER_SLOT * groups.shape[1]):
        sums = load.sum(axis=0)
        swaps = [_best_swap(load, sums, int(slot), pairs) for slot in (sums.argmax(), sums.argmin())]
        gain, slot, other, chosen = max(swaps)
        if gain <= 0:
            break
        for group in chosen:
            for values in (groups, load):
                values[group, [slot, other]] = values[group, [other, slot]]
    return groups


def _best_swap(load: Loads, sums: Loads, slot: int, pairs: tuple[NDArray[np.intp], ...]) -> Swap:
    """The swap between `slot` and another slot, in one or two groups, that makes their sums most equal."""
    first, second = pairs  # of groups; the same group twice means one swap
    difference = load[:, slot, None] - load  # [groups of a step, width]
    moved = difference[first] + np.where(first == second, 0, 1)[:, None] * difference[second]
    gain = moved * (sums[slot] - sums - moved)  # half the decrease of the sum of squares
    pair, other = divmod(int(gain.argmax()), load.shape[1])
    return int(gain[pair, other]), slot, other, sorted({int(first[pair]), int(second[pair])})
