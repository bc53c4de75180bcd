# SPDX-License-Identifier: Apache-2.0
"""Packing efficiency, visual balance, waits, drift and speed of the packer, compared with other algorithms.

Run: python packages/mindvl-data/benchmarks/packing.py [--quick] [--json]
docs/design/evidence/loader.md explains the figures. Lengths are random; no image is read.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from figures import Figure, median, print_report
from numpy.typing import NDArray
from packers import RIVALS, Closed, first_fit
from workloads import MIXES, Lengths, TooLong, draw

from mindvl_data import Packer
from mindvl_data.order.balance import balance_order

DP_SIZE, MICROBATCHES, WINDOW = 8, 8, 4
DRIFT_PACKS = 64  # packs in a window over which the number of samples is averaged
BUFFER = 256
TIGHT = (("issue", 1.10), ("issue", 1.05), ("documents", 1.05), ("captions only", 1.02), ("long tail", 1.25))
EFFICIENCY_TARGETS = {8192: 99.9, 4096: 99.7, 2048: 99.3}


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Results of one packer on one stream; packs closed at the end of the stream count only for waits."""

    efficiency: float  # share of positions that are not padding, percent
    visual_max: float  # maximum of the visual tokens per pack over their mean
    over_limit: int  # packs above the visual limit
    plain_rank: float  # imbalance of packs assigned in their order, percent
    plain_lock_step: float
    rank: float  # the same after the balance window of the data order
    lock_step: float
    worst_rank: float  # of all steps
    worst_lock_step: float
    longest_wait: int
    drift: float  # from the first pack on
    packs_per_s: float  # per second of processor time
    balanced_per_s: float  # the same with the balance window


def ours(lengths: list[int], capacity: int, buffer_size: int, *, visual: list[int], limit: int) -> Iterator[Closed]:
    """The packer of this package, called as in the data order."""
    density = sum(visual) / sum(lengths)
    packer: Packer[int] = Packer(
        capacity=capacity, max_patches=limit, patches_per_token=density, buffer_size=buffer_size
    )
    for number, length in enumerate(lengths):
        packer.add(number, length, visual[number])
        if packer.is_full:
            yield packer.next_pack(), number + 1
    while pack := packer.next_pack():
        yield pack, len(lengths)


def visual_limit(tokens: Lengths, visual: Lengths, capacity: int) -> int:
    """The rule of the data order: 1.25 times the mean of the mixture, but at least the largest sample."""
    return max(int(1.25 * visual.sum() / tokens.sum() * capacity), int(visual.max()))


def measure_packer(
    packer: Callable[[list[int], int, int], Iterator[Closed]],
    tokens: Lengths,
    visual: Lengths,
    capacity: int,
    limit: int,
    *,
    counts_last: bool = False,
) -> Packed:
    """Run a packer on a stream and measure its packs; `counts_last`: also those closed at its end."""
    lengths = tokens.tolist()
    started = time.process_time()
    closed = list(packer(lengths, capacity, BUFFER))
    seconds = time.process_time() - started
    packs, read = [pack for pack, _ in closed], np.array([stop for _, stop in closed])
    assert sorted(number for pack in packs for number in pack) == list(range(len(lengths))), (
        "a sample is missing or duplicated"
    )
    sums = np.array([tokens[pack].sum() for pack in packs])
    assert sums.max() <= capacity
    # First fit closes only full packs before the end, so all of its packs count.
    steady = np.full(len(packs), counts_last or packer is RIVALS["first fit"]) | (read < len(lengths))
    loads = np.array([visual[pack].sum() for pack in packs])[steady]
    counts = np.array([len(pack) for pack in packs])[steady]
    plain = imbalance(loads, balance=None)
    started = time.process_time()
    balanced = imbalance(loads, balance=window_balance)
    balance_seconds = time.process_time() - started
    return Packed(
        efficiency=100 * float(sums[steady].mean()) / capacity,
        visual_max=float(loads.max() / loads.mean()) if loads.any() else 1.0,
        over_limit=int((loads > limit).sum()),
        plain_rank=plain[0],
        plain_lock_step=plain[1],
        rank=balanced[0],
        lock_step=balanced[1],
        worst_rank=balanced[2],
        worst_lock_step=balanced[3],
        longest_wait=longest_wait(packs, read),
        drift=drift(counts),
        packs_per_s=len(packs) / seconds,
        balanced_per_s=1 / (seconds / len(packs) + balance_seconds / len(loads)),
    )


def longest_wait(packs: list[list[int]], read: NDArray[np.int64]) -> int:
    """The largest number of packs closed between reading a sample and closing its pack."""
    pack_of = np.empty(sum(map(len, packs)), np.int64)
    for number, pack in enumerate(packs):
        pack_of[pack] = number
    closed_before = np.searchsorted(read, np.arange(len(pack_of)), side="right")
    return int((pack_of - closed_before).max())


def drift(counts: NDArray[np.int64]) -> float:
    """Variance of the mean number of samples per pack over windows, relative to that of independent packs.

    1 means that packs are as if drawn independently; more means that short samples are concentrated in some windows.
    """
    windows = counts[: len(counts) // DRIFT_PACKS * DRIFT_PACKS].reshape(-1, DRIFT_PACKS).mean(axis=1)
    return float(windows.var(ddof=1) / (counts.var(ddof=1) / DRIFT_PACKS)) if len(windows) > 1 else float("nan")


Balance = Callable[[NDArray[np.int64]], NDArray[np.int64]]  # loads [W * packs of a step] -> order [W * packs of a step]


def imbalance(loads: NDArray[np.int64], *, balance: Balance | None) -> tuple[float, float, float, float]:
    """Load imbalance between ranks in percent of the mean load: (rank, lock-step), mean and maximum over steps.

    Rank: the maximum load of a rank in a step over the mean of the ranks. Lock-step: ranks synchronize after every
    microbatch, so the maximum of each microbatch counts.
    """
    window = WINDOW * DP_SIZE * MICROBATCHES
    if len(loads) < window or not loads.any():
        return 0.0, 0.0, 0.0, 0.0
    rank, lock_step = [], []
    for start in range(0, len(loads) - window + 1, window):
        part = loads[start : start + window]
        order = np.arange(window) if balance is None else balance(part)
        # Packs are assigned to ranks one by one, as `packs_of_rank` does.
        steps = part[order].reshape(WINDOW, MICROBATCHES, DP_SIZE).astype(np.float64)
        mean = steps.mean(axis=2)
        lock_step.extend(steps.max(axis=2).sum(axis=1) / mean.sum(axis=1) - 1)
        rank.extend(steps.sum(axis=1).max(axis=1) / steps.sum(axis=1).mean(axis=1) - 1)
    found = (np.mean(rank), np.mean(lock_step), np.max(rank), np.max(lock_step))
    return tuple(100 * float(value) for value in found)  # type: ignore[return-value]


def window_balance(loads: NDArray[np.int64]) -> NDArray[np.int64]:
    """The order of the packs of one balance window."""
    return balance_order(loads, global_batch_size=DP_SIZE * MICROBATCHES, width=DP_SIZE)


def run(*, quick: bool = False) -> list[Figure]:
    """Measure every mixture and pack size; targets apply to the mixture 'issue'."""
    count, seeds = (12_000, (1,)) if quick else (60_000, (1, 2, 3))
    figures = []
    for mix in MIXES:
        for capacity in EFFICIENCY_TARGETS if mix == "issue" else (8192,):
            figures += measure(mix, capacity, count, seeds)
            print(f"{mix}, packs of {capacity}: done", file=sys.stderr, flush=True)
    figures += measure("issue", 2048, count, seeds, too_long="drop")
    for mix, tightness in TIGHT:
        figures += measure_tight(mix, tightness, 8192, count // 3, seeds)
        print(f"{mix}, visual limit of {tightness} times the mean: done", file=sys.stderr, flush=True)
    return figures


def measure_tight(mix: str, tightness: float, capacity: int, count: int, seeds: tuple[int, ...]) -> list[Figure]:
    """Compare with first fit under the same visual limit, `tightness` times the mean of the mixture."""
    mine, theirs, bounds = [], [], []
    for seed in seeds:
        tokens, visual = draw(mix, count, capacity, seed)
        limit = int(tightness * visual.sum() / tokens.sum() * capacity)
        both = {"visual": visual.tolist(), "limit": limit}
        mine.append(measure_packer(partial(ours, **both), tokens, visual, capacity, limit))
        theirs.append(
            measure_packer(partial(first_fit, **both), tokens, visual, capacity, limit, counts_last=True).efficiency
        )
        bounds.append(100 * min(1.0, tokens.sum() / capacity / (np.minimum(visual, limit).sum() / limit)))
    efficiency, rival = median(one.efficiency for one in mine), median(theirs)
    longest, pace = max(one.longest_wait for one in mine), median(one.packs_per_s for one in mine)
    note = f"bound {median(bounds):.2f}, drift {median(one.drift for one in mine):.2f}, longest wait {longest} packs, "
    return [
        Figure(name=f"{mix} {capacity}, limit {tightness}: packing efficiency", value=efficiency, unit="%", at_least=rival,
               rival="first fit with the limit", rival_value=rival, note=note + f"{pace:,.0f} packs/s")
    ]  # fmt: skip


def measure(mix: str, capacity: int, count: int, seeds: tuple[int, ...], *, too_long: TooLong = "cut") -> list[Figure]:
    """Compare the packers on the same streams; medians over the seeds (waits and limits: the maximum)."""
    streams = [draw(mix, count, capacity, seed, too_long=too_long) for seed in seeds]
    mine, theirs = [], {name: [] for name in RIVALS}
    for tokens, visual in streams:
        limit = visual_limit(tokens, visual, capacity)
        mine.append(measure_packer(partial(ours, visual=visual.tolist(), limit=limit), tokens, visual, capacity, limit))
        for name, rival in RIVALS.items():
            theirs[name].append(measure_packer(rival, tokens, visual, capacity, limit))
    is_issue, has_images = mix == "issue" and too_long == "cut", any(visual.any() for _, visual in streams)
    where = f"{mix} {capacity}: " if too_long == "cut" else f"{mix} {capacity}, long ones dropped: "
    knapsack = theirs["greedy knapsack"]
    common = {"rival": "greedy knapsack"}
    at_8192 = is_issue and capacity == 8192

    def middle(name: str, packed: list[Packed]) -> float:
        return median(getattr(p, name) for p in packed)

    def pair(name: str) -> dict[str, float]:
        return {"value": middle(name, mine), "rival_value": middle(name, knapsack)}

    figures = [
        Figure(name=where + "packing efficiency", unit="%", at_least=EFFICIENCY_TARGETS[capacity] if is_issue else None,
               **pair("efficiency"), **common),
        Figure(name=where + "longest wait", value=max(p.longest_wait for p in mine), unit="packs", at_most=BUFFER,
               rival="first fit", rival_value=max(p.longest_wait for p in theirs["first fit"])),
        Figure(name=where + "drift", unit="", at_most=1.3 if is_issue else None, **pair("drift"), **common),
        Figure(name=where + "speed", unit="packs/s/core", at_least=5000 if at_8192 else None,
               **pair("packs_per_s"), **common, note=f"{middle('balanced_per_s', mine):,.0f} with the balance window"),
    ]  # fmt: skip
    if has_images:
        figures += [
            Figure(name=where + "packs over the visual limit", value=sum(p.over_limit for p in mine), unit="packs",
                   at_most=0, rival_value=sum(p.over_limit for p in knapsack), **common),
            Figure(name=where + "visual max / mean", unit="", at_most=1.26 if at_8192 else None,
                   **pair("visual_max"), **common),
            Figure(name=where + "rank imbalance", value=middle("rank", mine), unit="%",
                   at_most=1.0 if is_issue else None, rival="plain order", rival_value=middle("plain_rank", mine),
                   note=f"{max(p.worst_rank for p in mine):.2f} in the worst step"),
            Figure(name=where + "lock-step imbalance", value=middle("lock_step", mine), unit="%",
                   at_most=2.5 if is_issue else None, rival="plain order", rival_value=middle("plain_lock_step", mine),
                   note=f"{max(p.worst_lock_step for p in mine):.2f} in the worst step"),
        ]  # fmt: skip
    for name, packed in theirs.items():
        figures.append(
            Figure(name=f"{where}{name}, packing efficiency", value=middle("efficiency", packed), unit="%",
                   note=f"visual max/mean {middle('visual_max', packed):.2f}, drift {middle('drift', packed):.2f}, "
                        f"longest wait {max(p.longest_wait for p in packed)} packs, "
                        f"{middle('packs_per_s', packed):,.0f} packs/s")
        )  # fmt: skip
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer samples, one seed")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    print_report(run(quick=arguments.quick), as_json=arguments.json)


if __name__ == "__main__":
    main()
