# SPDX-License-Identifier: Apache-2.0
"""The step `cluster`: hierarchical clusters of images (B.1.1).

Comes after the filters and duplicates, before labels.py and sample.py. Embeddings are clustered by mini-batch k-means, and
clusters that are too broad are clustered again (tree.py). The step writes to its directory: `clusters.npz`, the
centroids, which a later run can use again; and `clusters.jsonl`, one line per cluster, in which people fill in `label`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.clusters.embeddings import check_model, embed
from mindvl_data.curation.clusters.kmeans import BATCH_ROWS, Points, Stream, batches, sample_points
from mindvl_data.curation.clusters.tree import ClusterTree, LeafSizes, build_tree, measure
from mindvl_data.curation.duplicates.groups import RecordTable
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Decision, Signatures, Step, register
from mindvl_data.errors import DataError

_MAP_SAMPLE = 4096  # points that determine the two axes of the map


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Parameters of `cluster`.

    Attributes:
        model: Embedding: a transformers directory of a vision model (CLIP, SigLIP, DINO), an ONNX file, or without a model
            "histograms" (colors and gradients) or "thumbnail" (16 x 16 gray pixels).
        num_clusters: Clusters of the first level; fewer if a cluster would have less than `min_size` records on average.
        broad: A cluster is divided if its variance is more than this many times the median of the first level.
        max_depth: Levels of clusters.
        min_size: Target for the minimum number of records of a cluster.
        num_exemplars: Records nearest to the centroid that are shown to people who label the cluster.
        centroids: `clusters.npz` of an earlier run, whose clusters and names are used again.
        directory: Directory for `clusters.npz` and `clusters.jsonl`; by default `clusters` in the cache of the pipeline.
    """

    model: str = "histograms"
    num_clusters: int = 1000
    broad: float = 2.0
    max_depth: int = 3
    min_size: int = 10
    num_exemplars: int = 9
    centroids: Path | None = None
    directory: Path | None = None

    def __post_init__(self) -> None:
        check_model(self.model)
        for name in ("num_clusters", "max_depth", "min_size", "num_exemplars"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}.")
        if not self.broad >= 1:
            raise ValueError(f"broad: must be at least 1, got {self.broad}.")


def cluster_directory(directory: Path | None, context: Context) -> Path:
    """Where the files of the clusters are."""
    return context.cache / "clusters" if directory is None else Path(directory)


def exemplar_name(cluster: str, rank: int) -> str:
    """File name of a thumbnail of a cluster."""
    return f"{cluster}-{rank:02d}.jpg"


def sign(records: list[Record], config: Cluster, context: Context) -> Sequence[NDArray[np.uint8]]:
    """The embedding of each record with images, in half precision."""
    found = [embed(record, config.model, context) for record in records]
    return [
        np.empty((0, 1), np.uint8) if vector is None else vector.astype("<f2")[None].view(np.uint8) for vector in found
    ]


def decide(signatures: Signatures, config: Cluster, context: Context, directory: Path) -> Iterable[Decision]:
    """Give each record its cluster, its distance from the centroid, and its place on a map of two dimensions."""
    table = RecordTable(signatures, directory / "records")
    stream = _stream(table)
    if config.centroids is not None:
        tree = ClusterTree.load(Path(config.centroids))
        if tree.centroids.shape[1] * 2 != signatures.width:
            raise DataError(
                f"steps: cluster: {config.centroids} has embeddings of {tree.centroids.shape[1]} numbers, the model "
                f"{config.model} gives {signatures.width // 2}. Use the model of the earlier run."
            )
    else:
        num_clusters = max(1, min(config.num_clusters, table.num_records // config.min_size))
        tree = build_tree(
            stream, num_clusters, context.seed, broad=config.broad, max_depth=config.max_depth, min_size=config.min_size
        )  # fmt: skip
    sizes = measure(tree, stream)
    exemplars = _exemplars(tree, stream, config.num_exemplars)
    _write_files(tree, sizes, exemplars, cluster_directory(config.directory, context))
    ranks = {int(record): rank for members in exemplars.values() for rank, record in enumerate(members)}
    mean, axes = _axes(sample_points(stream(), _MAP_SAMPLE, context.seed))
    start = 0
    for points in stream():
        numbers, pieces = table.names(np.arange(start, start + len(points)))
        leaves, distances = tree.assign(points)
        places = (points - mean) @ axes
        rows = zip(numbers.tolist(), pieces.tolist(), leaves.tolist(), distances.tolist(), places.tolist(), strict=True)
        for record, (number, piece, leaf, distance, (x, y)) in enumerate(rows, start):
            facts = {
                "cluster": tree.names[leaf],
                "cluster_distance": round(distance**0.5, 4),
                "cluster_x": round(x, 3),
                "cluster_y": round(y, 3),
            }
            yield Decision(
                number, piece, facts=facts | ({"cluster_exemplar": ranks[record]} if record in ranks else {})
            )
        start += len(points)


def _stream(table: RecordTable) -> Stream:
    """Embeddings in batches that do not depend on the blocks of the signatures."""

    def blocks() -> Iterator[Points]:
        for _, values in table.blocks():
            yield np.ascontiguousarray(values).view("<f2").astype(np.float32)

    return lambda: batches(blocks(), BATCH_ROWS)


def _exemplars(tree: ClusterTree, stream: Stream, count: int) -> dict[int, NDArray[np.int64]]:
    """For each leaf, the records nearest to its centroid, nearest first; then the earliest."""
    leaves = np.empty(0, np.int64)
    distances = np.empty(0, np.float32)
    records = np.empty(0, np.int64)
    start = 0
    for points in stream():
        new_leaves, new_distances = tree.assign(points)
        leaves, distances = np.concatenate([leaves, new_leaves]), np.concatenate([distances, new_distances])
        records = np.concatenate([records, np.arange(start, start + len(points))])
        order = np.lexsort((records, distances, leaves))
        leaves, distances, records = leaves[order], distances[order], records[order]
        rank = np.arange(len(leaves)) - np.searchsorted(leaves, leaves)
        leaves, distances, records = leaves[rank < count], distances[rank < count], records[rank < count]
        start += len(points)
    return {int(leaf): records[leaves == leaf] for leaf in np.unique(leaves)}


def _write_files(tree: ClusterTree, sizes: LeafSizes, exemplars: dict[int, NDArray[np.int64]], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tree.save(directory / "clusters.npz")
    lines = [
        {
            "cluster": tree.names[leaf],
            "label": "",
            "num_records": int(sizes.counts[leaf]),
            "variance": round(float(sizes.variances[leaf]), 5),
            "exemplars": [exemplar_name(tree.names[leaf], rank) for rank in range(len(members))],
        }
        for leaf, members in exemplars.items()
    ]
    (directory / "clusters.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _axes(points: Points) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Mean and the two main directions [D, 2] of points; the largest component of a direction is positive."""
    mean = points.mean(axis=0)
    _, _, directions = np.linalg.svd(points - mean, full_matrices=False)
    axes = np.zeros((points.shape[1], 2), np.float32)
    axes[:, : len(directions[:2])] = directions[:2].T
    signs = np.sign(np.take_along_axis(axes, np.abs(axes).argmax(axis=0)[None], axis=0))
    return mean, axes * np.where(signs == 0, 1, signs)


STEP = register(
    Step(
        name="cluster",
        config=Cluster,
        summary="Cluster images hierarchically by their embeddings; clusters that are too broad are divided again.",
        section="B.1.1",
        needs=("image",),
        gives=("cluster", "cluster_distance", "cluster_x", "cluster_y", "cluster_exemplar"),
        sign=sign,
        decide=decide,
    )
)
