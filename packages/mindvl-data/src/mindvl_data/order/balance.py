# SPDX-License-Identifier: Apache-2.0
"""The balance window: which of the packs of a few steps run side by side.

Comes after packing, before packs are dealt to ranks. Packs are sorted by visual load and cut into groups of packs that
run at the same time; each round of groups is dealt to the steps, the heaviest to the lightest step; inside a group
packs change places until every place has the same sum over a step. The size of a group belongs to the recipe, so the
packs of a step never depend on how many ranks there are. Integers only: the order is the same on every machine.
"""

import numpy as np
from numpy.typing import NDArray

_SWAPS_PER_PLACE = 8  # at most; a step settles after about two

Loads = NDArray[np.int64]
Swap = tuple[int, int, int, list[int]]  # (gain, place, other place, groups in which they change)


def balance_order(loads: Loads, *, global_batch_size: int, width: int) -> NDArray[np.int64]:
    """The order in which the packs of a window are used, so that ranks that wait for each other carry equal loads.

    Args:
        loads: [num_steps * global_batch_size] patches of each pack.
        width: Packs that run side by side; the largest divisor of `global_batch_size` up to this is used.

    Returns:
        [num_steps * global_batch_size] positions in `loads`, step after step. Dealt one by one to as many ranks as the
        width, or a divisor of it, ranks have nearly equal sums in each step and nearly equal loads at each moment.
        Other numbers of ranks gain too, but less, and so do ranks with one or two packs a step: 11 % was measured for 8
        packs on 4 ranks. A step of a single group holds packs of one load, so that steps
        differ; from four groups on they are alike.
    """
    num_steps = len(loads) // global_batch_size
    width = max(d for d in range(1, min(width, global_batch_size) + 1) if global_batch_size % d == 0)
    # Two neighbours stay together where a step has room: twice as many ranks then find near loads side by side too.
    together = 2 if global_batch_size % (2 * width) == 0 and global_batch_size >= 8 * width else 1
    by_load = np.argsort(-loads, kind="stable").reshape(-1, num_steps, together * width)
    steps = np.empty((num_steps, len(by_load), together * width), np.int64)
    sums = np.zeros(num_steps, np.int64)
    group_sums = loads[by_load].sum(axis=2)  # [rounds, num_steps], heaviest first
    for number in np.argsort(group_sums[:, -1] - group_sums[:, 0], kind="stable"):  # rounds that differ most go first
        lightest_first = np.argsort(sums, kind="stable")
        steps[lightest_first, number] = by_load[number]
        sums[lightest_first] += group_sums[number]
    # Read backwards in every other round, so that both of two neighbours come first equally often.
    steps[:, 1::2] = steps[:, 1::2, ::-1].copy()
    return np.concatenate([_even_places(step.reshape(-1, width), loads).reshape(-1) for step in steps])


def _even_places(groups: NDArray[np.int64], loads: Loads) -> NDArray[np.int64]:
    """Swap packs inside groups until the sums over each place agree as well as swaps can make them.

    Args:
        groups: [groups of a step, width] positions in `loads`; changed in place.
    """
    load = loads[groups]
    pairs = np.triu_indices(len(groups))
    for _ in range(_SWAPS_PER_PLACE * groups.shape[1]):
        sums = load.sum(axis=0)
        swaps = [_best_swap(load, sums, int(place), pairs) for place in (sums.argmax(), sums.argmin())]
        gain, place, other, chosen = max(swaps)
        if gain <= 0:
            break
        for group in chosen:
            for values in (groups, load):
                values[group, [place, other]] = values[group, [other, place]]
    return groups


def _best_swap(load: Loads, sums: Loads, place: int, pairs: tuple[NDArray[np.intp], ...]) -> Swap:
    """The exchange between `place` and another, in one group or in two, that brings their sums nearest together."""
    first, second = pairs  # of groups; the same one twice means one exchange
    difference = load[:, place, None] - load  # [groups of a step, width]
    moved = difference[first] + np.where(first == second, 0, 1)[:, None] * difference[second]
    gain = moved * (sums[place] - sums - moved)  # half of what the sum of squares loses
    pair, other = divmod(int(gain.argmax()), load.shape[1])
    return int(gain[pair, other]), place, other, sorted({int(first[pair]), int(second[pair])})
