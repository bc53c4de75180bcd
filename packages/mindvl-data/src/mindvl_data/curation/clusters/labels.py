# SPDX-License-Identifier: Apache-2.0
"""The steps `cluster_exemplars` and `cluster_labels`: people look at clusters and map them to categories (B.1.1).

Comes after cluster.py. `cluster_exemplars` writes a thumbnail of each record that the step `cluster` chose, beside
clusters.jsonl. People fill in `label` in a copy of this file; `cluster_labels` reads the copy.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from mindvl_data.curation.clusters.cluster import cluster_directory, exemplar_name
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop, Outcome, Step
from mindvl_data.errors import DataError
from mindvl_data.shards.atomic import write_atomically

DROP_LABEL = "drop"

_THUMBNAIL_SIDE = 224


@dataclass(frozen=True, kw_only=True)
class ClusterExemplars:
    """Parameters of `cluster_exemplars`.

    Attributes:
        directory: Directory for thumbnails; by default that of the step `cluster`.
    """

    directory: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterLabels:
    """Parameters of `cluster_labels`.

    Attributes:
        labels: JSON lines with `cluster` and `label`: clusters.jsonl of the step `cluster` with labels filled in. The
            label of cluster "7" also applies to "7.0", unless that cluster has its own label. Records of clusters with
            the label "drop" are dropped.
    """

    labels: Path


@Step(
    config=ClusterExemplars,
    summary="Write thumbnails of typical records of each cluster, for people who label clusters.",
    section="B.1.1",
    needs=("image", "cluster"),
)
def cluster_exemplars(records: list[Record], config: ClusterExemplars, context: Context) -> Sequence[Outcome]:
    """B.1.1: write thumbnails of the records nearest to their centroid, for people who label clusters."""
    directory = cluster_directory(config.directory, context)
    for record in records:
        if "cluster_exemplar" in record.facts:
            directory.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(record.image())
            image.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
            content = io.BytesIO()
            image.save(content, "JPEG", quality=85)
            path = directory / exemplar_name(record.facts["cluster"], record.facts["cluster_exemplar"])
            write_atomically(path, content.getvalue())  # a worker may be replaced while it writes
    return records


@Step(
    config=ClusterLabels,
    summary="Map clusters to categories by a file that people filled in.",
    section="B.1.1",
    needs=("cluster",),
    gives=("cluster_label",),
    reasons={"unwanted_cluster": "People gave the cluster the label drop."},
    prepare=lambda config, context: read_labels(config.labels),
)
def cluster_labels(records: list[Record], config: ClusterLabels, context: Context) -> Sequence[Outcome]:
    """B.1.1: give each record the category of its cluster; clusters with the label "drop" are dropped."""
    labels = context.resource(("cluster labels", config.labels), lambda: read_labels(Path(config.labels)))
    outcomes: list[Outcome] = []
    for record in records:
        label = label_of(str(record.facts.get("cluster", "")), labels)
        if label == DROP_LABEL:
            outcomes.append(Drop("unwanted_cluster", record.facts["cluster"]))
        else:
            outcomes.append(record.with_facts(cluster_label=label) if label else record)
    return outcomes


def read_labels(path: Path) -> dict[str, str]:
    """Cluster -> label, without clusters whose label is empty.

    Raises:
        DataError: The file cannot be read, or a line has no cluster or label.
    """
    labels: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: the labels cannot be read: {error}. Correct the path in `labels`.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: is not valid JSON: {error}. Correct the line.") from error
        cluster, label = (entry.get("cluster"), entry.get("label")) if isinstance(entry, dict) else (None, None)
        if not isinstance(cluster, str) or not isinstance(label, str):
            raise DataError(
                f"{path}:{number}: `cluster` and `label` must be strings, got {line[:80]!r}. Correct the line."
            )
        if label:
            labels[cluster] = label
    return labels


def label_of(cluster: str, labels: dict[str, str]) -> str:
    """The label of the cluster, or else of the nearest cluster above it; "" if none has one."""
    while cluster:
        if cluster in labels:
            return labels[cluster]
        cluster = cluster.rpartition(".")[0]
    return ""
