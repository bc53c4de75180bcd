# SPDX-License-Identifier: Apache-2.0
"""The step `embedding_duplicates`: images whose embeddings have a high cosine similarity.

Comes after the other steps for duplicates. Up to 10,000 records, all pairs are compared. More are divided by k-means, each
record belongs to its two nearest clusters, and all pairs inside a cluster are compared, after SemDeDup (Abbas et al.,
2023), which uses one cluster per record; pairs without a common cluster are missed. Embeddings are sorted by cluster on
disk, and compared in tiles, so that memory stays within `memory_mib` and the sample for k-means.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.clusters.embeddings import check_model, embed
from mindvl_data.curation.clusters.kmeans import BATCH_ROWS, Points, batches, fit, nearest
from mindvl_data.curation.duplicates.exact import MIB, check_memory_mib
from mindvl_data.curation.duplicates.groups import Groups, RecordTable, Rows, decisions, preference
from mindvl_data.curation.duplicates.minhash import PREFERENCE_BYTES
from mindvl_data.curation.duplicates.sorting import SortedRuns
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Decision, Signatures, Step, register

CLUSTER_ROWS = 10_000  # records that a cluster should have

_TILE = 2048  # records that are compared with as many others at a time


@dataclass(frozen=True, kw_only=True)
class EmbeddingDuplicates:
    """Parameters of `embedding_duplicates`.

    Attributes:
        model: Embedding: a transformers directory of a vision model (CLIP, SigLIP, DINO), an ONNX file, or without a model
            "thumbnail" (16 x 16 gray pixels) or "histograms" (colors and gradients).
        similarity: Minimum cosine similarity of duplicates. The default suits "thumbnail"; to choose one for a model,
            see the groups on the page.
        keep: Fact whose greatest value selects the record to keep, for example "image_width"; by default the
            first record in input order is kept.
        memory_mib: Memory for sorting, in MiB.
    """

    model: str = "thumbnail"
    similarity: float = 0.97
    keep: str = ""
    memory_mib: int = 1024

    def __post_init__(self) -> None:
        check_model(self.model)
        check_memory_mib(self.memory_mib)
        if not 0 < self.similarity <= 1:
            raise ValueError(f"similarity: must be greater than 0 and at most 1, got {self.similarity}.")


def sign(records: list[Record], config: EmbeddingDuplicates, context: Context) -> Sequence[NDArray[np.uint8]]:
    """The embedding of each record with images in half precision, and the preference."""
    found = []
    for record in records:
        vector = embed(record, config.model, context)
        if vector is None or not vector.any():  # no image, or an image of one color
            found.append(np.empty((0, 1), np.uint8))
            continue
        preferred = np.array([preference(record, config.keep)], "<f8").view(np.uint8)
        found.append(np.concatenate([vector.astype("<f2").view(np.uint8), preferred])[None])
    return found


def decide(
    signatures: Signatures, config: EmbeddingDuplicates, context: Context, directory: Path
) -> Iterable[Decision]:
    """Join similar pairs inside clusters, and keep one record of each group."""
    table = RecordTable(signatures, directory / "records")
    groups = Groups(table.num_records)
    row = np.dtype([("record", "<u4"), ("vector", "<f2", (signatures.width - PREFERENCE_BYTES) // 2)])
    sorted_path = directory / "by-cluster.bin"
    sizes = _sort_by_cluster(table, row, sorted_path, config, context.seed, directory)
    rows = np.memmap(sorted_path, row, "r") if sizes.sum() else np.empty(0, row)
    start = 0
    for size in sizes.tolist():
        _join_similar(rows[start : start + size], groups, config.similarity)
        start += size
    preferences = (
        (records, np.ascontiguousarray(values[:, -PREFERENCE_BYTES:]).view("<f8")[:, 0])
        for records, values in table.blocks()
    )
    return decisions(groups, table, preferences, reason="embedding_duplicate")


def _sort_by_cluster(
    table: RecordTable, row: np.dtype[Any], path: Path, config: EmbeddingDuplicates, seed: int, directory: Path
) -> NDArray[np.int64]:
    """Write the records of each cluster after each other; returns the sizes of the clusters."""

    def stream() -> Iterator[Points]:
        return batches((vectors for _, vectors in _blocks(table)), BATCH_ROWS)

    num_clusters = -(-table.num_records // CLUSTER_ROWS)
    centroids = fit(stream, num_clusters, seed) if num_clusters > 1 else None
    runs = SortedRuns(directory / "runs", row, memory_bytes=config.memory_mib * MIB)
    start = 0
    for vectors in stream():
        count = 1 if centroids is None else min(2, len(centroids))
        clusters = np.zeros((len(vectors), 1), int) if centroids is None else nearest(vectors, centroids, count)[0]
        values = np.empty(len(vectors), row)
        values["record"], values["vector"] = np.arange(start, start + len(vectors)), vectors
        for column in clusters.T:
            runs.add(column.astype(np.uint64), values)
        start += len(vectors)
    sizes = np.zeros(max(1, num_clusters), np.int64)
    with open(path, "wb") as file:
        for keys, values in runs.merged():
            values.tofile(file)
            sizes += np.bincount(keys.astype(np.int64), minlength=len(sizes))
    return sizes


def _join_similar(rows: NDArray[Any], groups: Groups, similarity: float) -> None:
    """Compare all pairs of rows in tiles."""
    for first in range(0, len(rows), _TILE):
        left = rows[first : first + _TILE]
        left_vectors = left["vector"].astype(np.float32)
        for second in range(first, len(rows), _TILE):
            right = rows[second : second + _TILE]
            similar = left_vectors @ right["vector"].astype(np.float32).T >= similarity
            i, j = np.nonzero(np.triu(similar, 1) if first == second else similar)
            groups.join(left["record"][i], right["record"][j])


def _blocks(table: RecordTable) -> Iterator[tuple[Rows, Points]]:
    for records, values in table.blocks():
        vectors = np.ascontiguousarray(values[:, :-PREFERENCE_BYTES]).view("<f2").astype(np.float32)
        yield records, vectors


STEP = register(
    Step(
        name="embedding_duplicates",
        config=EmbeddingDuplicates,
        summary="Keep one of the records whose images have embeddings with a high cosine similarity.",
        section="B.1.1",
        needs=("image",),
        gives=("duplicate_group", "num_duplicates"),
        reasons={"embedding_duplicate": "An earlier or better record has an image with a similar embedding."},
        sign=sign,
        decide=decide,
    )
)
