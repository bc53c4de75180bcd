# SPDX-License-Identifier: Apache-2.0
"""Fill, visual balance and speed of the packer on a mixture of captions, documents, charts and text.

Run: python packages/mindvl-data/benchmarks/packing.py [--samples 60000] [--seed 1]
"""

import argparse
import time

import numpy as np
from numpy.typing import NDArray

from mindvl_data import Packer

Lengths = NDArray[np.int64]


def workload(count: int, capacity: int, seed: int) -> tuple[Lengths, Lengths]:
    """(tokens, visual tokens): 40 % captions, 15 % pages, 25 % charts, 20 % text; cut to a row."""
    generator = np.random.default_rng(seed)
    kind = generator.choice(4, size=count, p=(0.40, 0.15, 0.25, 0.20))
    tokens, share = np.zeros(count), np.zeros(count)
    drawn: dict[int, tuple[NDArray[np.float64], tuple[float, float]]] = {
        0: (generator.integers(100, 401, count).astype(float), (0.45, 0.80)),
        1: (np.exp(generator.uniform(np.log(1000), np.log(4000), count)), (0.55, 0.85)),
        2: (generator.integers(500, 1501, count).astype(float), (0.50, 0.85)),
        3: (np.clip(np.exp(generator.normal(np.log(900), 0.9, count)), 200, 8192), (0.0, 0.0)),
    }
    for number, (lengths, (low, high)) in drawn.items():
        here = kind == number
        tokens[here] = lengths[here]
        share[here] = generator.uniform(low, high, count)[here]
    length = np.minimum(tokens, capacity).astype(np.int64)
    return length, (length * share).astype(np.int64)


def measure(capacity: int, count: int, seed: int, buffer_size: int = 256) -> str:
    tokens, visual = workload(count, capacity, seed)
    density = float(visual.sum() / tokens.sum())
    limit = max(int(1.25 * density * capacity), int(visual.max()))
    packer: Packer[int] = Packer(
        capacity=capacity, max_patches=limit, patches_per_token=density, buffer_size=buffer_size
    )
    rows: list[list[int]] = []
    length_list, visual_list = tokens.tolist(), visual.tolist()
    started = time.process_time()
    for number in range(count):
        packer.add(number, length_list[number], visual_list[number])
        if packer.is_full:
            rows.append(packer.next_row())
    seconds = time.process_time() - started
    sums = np.array([tokens[row].sum() for row in rows])
    loads = np.array([visual[row].sum() for row in rows])
    assert sums.max() <= capacity
    assert loads.max() <= limit
    return (
        f"{capacity:>6} {len(rows):>6} rows  fill {100 * sums.mean() / capacity:6.2f} %  "
        f"visual max/mean {loads.max() / loads.mean():.3f} cv {loads.std() / loads.mean():.3f}  "
        f"{len(rows) / seconds:7.0f} rows/s  {count / seconds:7.0f} samples/s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for row_capacity in (8192, 4096, 2048):
        print(measure(row_capacity, arguments.samples, arguments.seed), flush=True)
