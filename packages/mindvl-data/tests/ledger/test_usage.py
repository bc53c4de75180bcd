# SPDX-License-Identifier: Apache-2.0
"""Which samples an epoch used, against plain sets."""

import random
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np

from mindvl_data.ledger.usage import EpochUse, UsableSamples


def test_a_sample_is_new_once_like_in_a_set() -> None:
    choose = random.Random(5)
    use, seen = EpochUse(), set()
    for _ in range(2000):
        sample = (f"shard-{choose.randrange(3)}", choose.randrange(400))
        assert use.add(*sample) == (sample not in seen)
        seen.add(sample)


def test_forged_rows_take_no_more_memory_than_there_are_of_them() -> None:
    use = EpochUse()
    tracemalloc.start()
    for shard in range(1000):
        assert use.add(f"s{shard}", (1 << 61) + shard)
    assert tracemalloc.get_traced_memory()[0] < 1 << 20
    tracemalloc.stop()


def test_the_difference_from_what_can_be_used_is_counted_and_its_first_place_named() -> None:
    usable = [("a", np.array([True, False, True] * 5)), ("b", np.ones(9, np.bool_))]

    def used(*left_out: tuple[str, int]) -> EpochUse:
        use = EpochUse()
        for shard, can in usable:
            for row in np.flatnonzero(can).tolist():
                assert (shard, row) in left_out or use.add(shard, row)
        return use

    assert used().compare(usable) is None
    assert used(("b", 3), ("b", 8)).compare(usable) == (
        "2 usable samples are missing, 0 are not usable, the first is b sample 3"
    )
    more = used(("a", 5))
    for shard, row in (("a", 1), ("b", 20), ("c", 0)):
        assert more.add(shard, row)
    assert more.compare(usable) == "1 usable samples are missing, 3 are not usable, the first is a sample 1"
    assert EpochUse().compare(usable) == "19 usable samples are missing, 0 are not usable, the first is a sample 0"


def test_samples_of_the_length_of_a_pack_and_of_the_most_patches_are_usable() -> None:
    source: Any = SimpleNamespace(
        index=SimpleNamespace(shards=SimpleNamespace(names=["a"])),
        lengths=lambda shard: (np.array([0, 1, 8, 9, 8, 8, 8]), np.array([0, 0, 0, 0, 4, 5, 4])),
        used_rows=lambda shard: np.arange(6),
    )
    ((name, can),) = UsableSamples(source, seq_length=8, max_patches=4)
    assert (name, can.tolist()) == ("a", [False, True, True, False, True, False, False])
