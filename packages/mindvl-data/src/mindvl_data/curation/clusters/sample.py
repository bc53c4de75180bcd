# SPDX-License-Identifier: Apache-2.0
"""The step `cluster_sample`: take more from clusters of larger variance, and keep the long tail (B.1.1).

Comes after cluster.py. The variance of a cluster is the mean squared distance of its records from the centroid. Which
records of a cluster are kept depends on the seed and the numbers of the records. Memory: a few numbers for each cluster,
and one sort of 12 bytes for each record within `memory_mib`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.clusters.quota import quotas
from mindvl_data.curation.duplicates.exact import MIB, check_memory_mib
from mindvl_data.curation.duplicates.groups import RecordTable
from mindvl_data.curation.duplicates.sorting import SortedRuns, combined
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Decision, Drop, Signatures, Step, register
from mindvl_data.errors import SampleError

_MEMBER = np.dtype([("cluster", "S48"), ("distance", "<f8")])


@dataclass(frozen=True, kw_only=True)
class ClusterSample:
    """Parameters of `cluster_sample`.

    Attributes:
        share: Share of the records with a cluster that are kept.
        floor: Records that every cluster keeps if it has them, so that rare concepts stay.
        memory_mib: Memory for sorting, in MiB.
    """

    share: float
    floor: int = 10
    memory_mib: int = 1024

    def __post_init__(self) -> None:
        check_memory_mib(self.memory_mib)
        if not 0 < self.share <= 1:
            raise ValueError(f"share: must be greater than 0 and at most 1, got {self.share}.")
        if self.floor < 0:
            raise ValueError(f"floor: must be at least 0, got {self.floor}.")


def sign(records: list[Record], config: ClusterSample, context: Context) -> Sequence[NDArray[np.uint8]]:
    """The cluster of each record, and its distance from the centroid."""
    found = []
    for record in records:
        rows = np.zeros(1 if "cluster" in record.facts else 0, _MEMBER)
        if len(rows):
            name = str(record.facts["cluster"]).encode()
            if len(name) > _MEMBER["cluster"].itemsize:
                raise SampleError(f"the name of the cluster has {len(name)} bytes, at most 48 are possible")
            rows["cluster"], rows["distance"] = name, record.facts["cluster_distance"]
        found.append(rows.view(np.uint8).reshape(len(rows), _MEMBER.itemsize))
    return found


def decide(signatures: Signatures, config: ClusterSample, context: Context, directory: Path) -> Iterable[Decision]:
    """Drop the records beyond the quota of their cluster."""
    table = RecordTable(signatures, directory / "records")
    names, sizes, variances = cluster_sizes(rows for _, rows in table.rows(_MEMBER))
    taken = quotas(round(config.share * table.num_records), variances, sizes, config.floor)
    runs = SortedRuns(directory / "runs", np.uint32, memory_bytes=config.memory_mib * MIB)
    for records, rows in table.rows(_MEMBER):
        numbers, pieces = table.names(records)
        order = combined(np.stack([numbers, pieces.astype(np.uint64)], axis=1), seed=context.seed + 1)
        clusters = np.searchsorted(names, rows["cluster"]).astype(np.uint64)
        runs.add(clusters << np.uint64(32) | order >> np.uint64(32), records)
    seen = np.zeros(len(names), np.int64)
    for keys, records in runs.merged():
        clusters = (keys >> np.uint64(32)).astype(np.int64)
        ranks = seen[clusters] + np.arange(len(clusters)) - np.searchsorted(clusters, clusters)
        seen += np.bincount(clusters, minlength=len(names))
        over = ranks >= taken[clusters]
        numbers, pieces = table.names(records[over])
        for number, piece, cluster in zip(numbers.tolist(), pieces.tolist(), clusters[over].tolist(), strict=True):
            value = f"{taken[cluster]} of {sizes[cluster]} of cluster {names[cluster].decode()}"
            yield Decision(number, piece, Drop("over_quota", value))


def cluster_sizes(
    blocks: Iterable[NDArray[Any]],
) -> tuple[NDArray[np.bytes_], NDArray[np.int64], NDArray[np.float64]]:
    """Names of the clusters, ascending, their records, and their variances."""
    counts: dict[bytes, int] = {}
    sums: dict[bytes, float] = {}
    for rows in blocks:
        names, places = np.unique(rows["cluster"], return_inverse=True)
        squares = np.bincount(places, rows["distance"] ** 2)
        for name, count, square in zip(names.tolist(), np.bincount(places).tolist(), squares.tolist(), strict=True):
            counts[name] = counts.get(name, 0) + count
            sums[name] = sums.get(name, 0.0) + square
    ordered = sorted(counts)
    sizes = np.array([counts[name] for name in ordered], np.int64)
    squares = np.array([sums[name] for name in ordered])
    # Rounded, so that the blocks in which the sum was computed do not change the quotas.
    return np.array(ordered, _MEMBER["cluster"]), sizes, np.round(squares / np.maximum(sizes, 1), 9)


STEP = register(
    Step(
        name="cluster_sample",
        config=ClusterSample,
        summary="Keep a share of the records: a larger share of clusters with a larger variance, and a minimum of each cluster.",
        section="B.1.1",
        needs=("cluster", "cluster_distance"),
        reasons={"over_quota": "The cluster gives enough records without it."},
        sign=sign,
        decide=decide,
    )
)
