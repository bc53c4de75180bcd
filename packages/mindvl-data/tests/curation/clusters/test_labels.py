# SPDX-License-Identifier: Apache-2.0
"""Thumbnails for people, and labels that people gave."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindvl_data.curation.clusters.labels import (
    ClusterExemplars,
    ClusterLabels,
    cluster_exemplars,
    cluster_labels,
    label_of,
    read_labels,
)
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop, find_step
from mindvl_data.errors import DataError


def _record(number: int, **facts: Any) -> Record:
    buffer = io.BytesIO()
    Image.fromarray(np.full((300, 600, 3), number, np.uint8)).save(buffer, "PNG")
    return Record(number=number, id="a", body={}, media=(buffer.getvalue(),), facts=facts)


def test_thumbnails_are_written_for_exemplars_only(context: Context) -> None:
    records = [_record(1, cluster="7.1", cluster_exemplar=3), _record(2, cluster="7.1")]
    assert cluster_exemplars(records, ClusterExemplars(), context) == records
    (path,) = (context.cache / "clusters").iterdir()
    assert path.name == "7.1-03.jpg"
    with Image.open(path) as image:
        assert image.size == (224, 112)


def test_labels_hold_for_clusters_below_unless_these_have_their_own(tmp_path: Path, context: Context) -> None:
    path = tmp_path / "labels.jsonl"
    lines = [("7", "animal"), ("7.1", "drop"), ("8", ""), ("9.0", "chart")]
    path.write_text("\n".join(f'{{"cluster": "{cluster}", "label": "{label}"}}' for cluster, label in lines))
    assert read_labels(path) == {"7": "animal", "7.1": "drop", "9.0": "chart"}
    records = [Record(number=n, id="", body={}, facts={"cluster": name}) for n, name in enumerate(
        ["7", "7.0", "7.1.2", "8", "9.0", "9", "77"])]  # fmt: skip
    found = cluster_labels(records, ClusterLabels(labels=path), context)
    assert found[2] == Drop("unwanted_cluster", "7.1.2")
    assert "unwanted_cluster" in find_step("cluster_labels").reasons
    labels = [one.facts.get("cluster_label") for one in found if isinstance(one, Record)]
    assert labels == ["animal", "animal", None, "chart", None, None]


def test_the_label_of_the_nearest_cluster_above_counts() -> None:
    assert label_of("1.2.3", {"1": "a", "1.2": "b"}) == "b"
    assert label_of("", {"1": "a"}) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", ":1: is not valid JSON"), ('{"cluster": 7, "label": "a"}', "`cluster` and `label` must be strings")],
)
def test_damaged_labels_are_refused_before_the_run(text: str, message: str, tmp_path: Path, context: Context) -> None:
    (tmp_path / "labels.jsonl").write_text(text)
    prepare = find_step("cluster_labels").prepare
    assert prepare is not None
    with pytest.raises(DataError, match=message):
        prepare(ClusterLabels(labels=tmp_path / "labels.jsonl"), context)
    with pytest.raises(DataError, match="cannot be read"):
        prepare(ClusterLabels(labels=tmp_path / "none.jsonl"), context)
    assert find_step("cluster_exemplars").prepare is None
