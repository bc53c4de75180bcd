# SPDX-License-Identifier: Apache-2.0
"""Successive halving over the cells of a resolution grid: half of them are stopped after every round.

Used by search.py instead of scoring every cell on every item. Items come in a random order in which every prefix has the same
mix of tasks. Cells whose model inputs are equal on all items count as one, because they cost nothing more. Source: Jamieson and
Talwalkar, "Non-stochastic best arm identification", 2016; a cell is also stopped when a paired confidence interval excludes
that it is the best.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mindvl_merge.evaluation.choice import task_means

if TYPE_CHECKING:
    from mindvl_merge.evaluation.search import Requests

Table = npt.NDArray[np.float64]

_FIRST_SHARE = 1 / 8  # of the items in the first round; it doubles
_DEVIATIONS = 3.0  # half width of a confidence interval in standard errors
_MIN_ITEMS = 16  # below, standard errors are not trusted


def halved(
    requests: "Requests[Any]", columns: Sequence[int], tasks: Sequence[str], tokens: Table, *, seed: int
) -> dict[int, tuple[list[int], Table]]:
    """Scores of every cell on the items of the rounds that it took part in; the last cells on all items.

    Args:
        columns: Items that take part.
        tasks: Task of every item of `requests`.
        tokens: Visual tokens `[cells, items]`; of equally good cells the cheapest remain.

    Returns:
        For each cell its items and their scores.
    """
    order = _mixed_order(columns, tasks, seed)
    classes = _equal_cells(requests.position_of[:, order])
    alive = list(classes)  # one cell of each class
    scored: dict[int, tuple[list[int], Table]] = {}
    for stop in _round_sizes(len(order), len(alive)):
        seen = order[:stop]
        table = requests.scores(alive, seen)
        for cell, row in zip(alive, table, strict=True):
            scored |= {equal: (seen, row) for equal in classes[cell]}
        if stop < len(order):
            alive = _remaining(alive, table, [tasks[column] for column in seen], tokens[:, columns].mean(axis=1))
    return scored


def _remaining(alive: list[int], table: Table, tasks: Sequence[str], cost: Table) -> list[int]:
    means = [fmean(task_means(tasks, row).values()) for row in table]
    best = max(range(len(alive)), key=lambda place: (means[place], -cost[alive[place]]))
    kept = [place for place in range(len(alive)) if place == best or not _is_behind(table[place] - table[best])]
    kept.sort(key=lambda place: (-means[place], cost[alive[place]], alive[place]))
    return [alive[place] for place in kept[: max(1, -(-len(alive) // 2))]]


def _is_behind(difference: Table) -> bool:
    """Whether the paired difference from the leader is below zero with confidence."""
    if len(difference) < _MIN_ITEMS:
        return False
    error = float(difference.std(ddof=1)) / len(difference) ** 0.5
    return float(difference.mean()) + _DEVIATIONS * error < 0


def _round_sizes(num_items: int, num_cells: int) -> list[int]:
    """Numbers of items after each round; a single cell needs no rounds."""
    sizes, share = [], _FIRST_SHARE
    while num_cells > 1 and share < 1:
        sizes.append(max(1, round(share * num_items)))
        share *= 2
    return [*sorted(set(sizes) - {num_items}), num_items]


def _mixed_order(columns: Sequence[int], tasks: Sequence[str], seed: int) -> list[int]:
    """A random order in which the tasks alternate in proportion to their sizes."""
    generator = np.random.default_rng(seed)
    places: list[tuple[float, int]] = []
    for task in dict.fromkeys(tasks[column] for column in columns):
        mine = [column for column in columns if tasks[column] == task]
        shuffled = [mine[place] for place in generator.permutation(len(mine))]
        places += [((number + 0.5) / len(mine), column) for number, column in enumerate(shuffled)]
    return [column for _, column in sorted(places)]


def _equal_cells(positions: npt.NDArray[np.int64]) -> dict[int, list[int]]:
    """The first cell of each class -> all cells with the same model inputs."""
    classes: dict[bytes, list[int]] = {}
    for row, position in enumerate(positions):
        classes.setdefault(position.tobytes(), []).append(row)
    return {cells[0]: cells for cells in classes.values()}
