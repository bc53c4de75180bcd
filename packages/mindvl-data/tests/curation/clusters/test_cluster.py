# SPDX-License-Identifier: Apache-2.0
"""The step `cluster` on images of known kinds."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindvl_data.curation.clusters.cluster import STEP, Cluster
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context
from mindvl_data.errors import DataError

COLORS = [(220, 30, 30), (30, 200, 40), (40, 60, 220)]


def _record(number: int, kind: int) -> Record:
    """An image of one color with noise."""
    noise = np.random.default_rng(number).integers(-20, 20, (24, 24, 3))
    buffer = io.BytesIO()
    Image.fromarray((np.array(COLORS[kind]) + noise).clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
    return Record(number=number, id=str(number), body={}, media=(buffer.getvalue(),))


KINDS = [0] * 30 + [1] * 8 + [2] * 4
RECORDS = [_record(number, kind) for number, kind in enumerate(KINDS)]


def test_kinds_of_images_become_clusters_with_files_for_people(decide: Any, context: Context) -> None:
    records = [*RECORDS, Record(number=99, id="text", body={"content": "no image"})]
    found = decide(STEP, Cluster(num_clusters=3, min_size=2, broad=100, num_exemplars=2), records)
    assert set(found) == set(range(42))
    clusters = [found[number].facts["cluster"] for number in range(42)]
    assert len({*zip(KINDS, clusters, strict=True)}) == 3
    lines = [json.loads(line) for line in (context.cache / "clusters/clusters.jsonl").read_text().splitlines()]
    assert sorted(line["num_records"] for line in lines) == [4, 8, 30]
    for line in lines:
        members = [number for number in found if found[number].facts["cluster"] == line["cluster"]]
        nearest = sorted(members, key=lambda number: found[number].facts["cluster_distance"])[:2]
        assert [found[number].facts.get("cluster_exemplar") for number in nearest] == [0, 1]
        assert line["exemplars"] == [f"{line['cluster']}-00.jpg", f"{line['cluster']}-01.jpg"]
        mean = np.mean([found[number].facts["cluster_distance"] ** 2 for number in members])
        assert line["variance"] == pytest.approx(mean, abs=1e-3)
        assert line["label"] == ""
    assert sum("cluster_exemplar" in decision.facts for decision in found.values()) == 6
    assert {"cluster", "cluster_distance", "cluster_x", "cluster_y"} <= found[0].facts.keys()
    assert found[0].facts.keys() <= set(STEP.gives)


def test_clusters_of_an_earlier_run_are_used_again(decide: Any, context: Context, tmp_path: Path) -> None:
    config = Cluster(num_clusters=3, min_size=2, directory=tmp_path / "first")
    first = decide(STEP, config, RECORDS)
    again = decide(STEP, Cluster(centroids=tmp_path / "first/clusters.npz"), RECORDS[25:])
    for number in range(25, 42):
        assert again[number].facts["cluster"] == first[number].facts["cluster"]
    with pytest.raises(DataError, match="embeddings of 236 numbers, the model thumbnail gives 256"):
        decide(STEP, Cluster(model="thumbnail", centroids=tmp_path / "first/clusters.npz"), RECORDS)


def test_few_records_make_few_clusters(decide: Any) -> None:
    found = decide(STEP, Cluster(), RECORDS[:9])
    assert {decision.facts["cluster"] for decision in found.values()} == {"0"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"num_clusters": 0}, "num_clusters: "), ({"broad": 0.5}, "broad: "), ({"model": "none"}, "model: ")],
)
def test_parameters_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster(**fields)
