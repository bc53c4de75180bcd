# SPDX-License-Identifier: Apache-2.0
"""Sampling by variance on a synthetic set with known clusters."""

from typing import Any

import numpy as np
import pytest

from mindvl_data.curation.clusters.sample import STEP, ClusterSample, cluster_sizes
from mindvl_data.curation.record import Record

# name -> records, standard deviation: a large tight one, two of equal size but unequal variance, and two rare ones
CLUSTERS = {"0": (4000, 0.1), "1": (1000, 0.2), "2": (1000, 0.4), "3": (12, 0.5), "4": (3, 0.05)}


def _records() -> list[Record]:
    generator = np.random.default_rng(0)
    facts = [
        {"cluster": name, "cluster_distance": float(round(abs(distance), 6))}
        for name, (count, deviation) in CLUSTERS.items()
        for distance in deviation * generator.choice([-1, 1], count)
    ]
    generator.shuffle(facts)
    return [Record(number=number, id="", body={}, facts=one) for number, one in enumerate(facts)]


def test_shares_follow_variance_and_rare_clusters_are_kept(decide: Any) -> None:
    records = _records()
    found = decide(STEP, ClusterSample(share=0.1, floor=10), records)
    kept = [record.facts["cluster"] for record in records if record.number not in found]
    # 602 of 6015 are kept. Floors: 10, 10, 10, 10, 3, together 43. The other 559 follow the variances 0.01, 0.04, 0.16
    # and 0.25; the fourth cluster has only 2 more and gives them; 557 in shares of 1 : 4 : 16 are 26.5, 106.1 and 424.4,
    # of which the first has the largest remainder.
    assert {name: kept.count(name) for name in CLUSTERS} == {"0": 37, "1": 116, "2": 434, "3": 12, "4": 3}
    tight = next(decision for decision in found.values() if decision.drop.value.endswith("cluster 0"))
    assert (tight.drop.reason, tight.drop.value) == ("over_quota", "37 of 4000 of cluster 0")


def test_a_choice_inside_a_cluster_does_not_depend_on_other_records(decide: Any) -> None:
    records = _records()
    kept = {r.number for r in records} - decide(STEP, ClusterSample(share=0.1, floor=0), records).keys()
    ones = [record for record in records if record.facts["cluster"] == "1"]
    fewer = {r.number for r in ones} - decide(STEP, ClusterSample(share=0.05, floor=0), ones).keys()
    chosen = {record.number for record in ones} & kept
    assert len(fewer) == 50
    assert len(chosen) > 50
    assert fewer < chosen


def test_records_without_a_cluster_are_kept(decide: Any) -> None:
    records = [Record(number=number, id="", body={}) for number in range(5)]
    assert decide(STEP, ClusterSample(share=0.1), records) == {}


def test_sizes_and_variances_are_added_over_blocks() -> None:
    rows = np.array([(b"b", 1.0), (b"a", 2.0), (b"b", 3.0)], [("cluster", "S48"), ("distance", "<f8")])
    names, sizes, variances = cluster_sizes([rows[:1], rows[1:]])
    assert (names.tolist(), sizes.tolist(), variances.tolist()) == ([b"a", b"b"], [1, 2], [4.0, 5.0])


@pytest.mark.parametrize(("share", "floor"), [(0.0, 1), (1.5, 1), (0.5, -1)])
def test_parameters_out_of_range_are_refused(share: float, floor: int) -> None:
    with pytest.raises(ValueError, match=r"share: |floor: "):
        ClusterSample(share=share, floor=floor)
