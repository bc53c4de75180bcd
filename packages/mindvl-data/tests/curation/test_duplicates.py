# SPDX-License-Identifier: Apache-2.0
"""Set steps of duplicates and clusters in a real pipeline: counts by hand, and the same bytes with one and two workers."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindvl_data.curation.clusters.cluster import Cluster
from mindvl_data.curation.clusters.labels import ClusterExemplars
from mindvl_data.curation.clusters.sample import ClusterSample
from mindvl_data.curation.config import CurationConfig, InputConfig, OutputConfig, StepConfig
from mindvl_data.curation.contamination.decontaminate import Decontaminate
from mindvl_data.curation.duplicates.exact import ExactDuplicates
from mindvl_data.curation.duplicates.minhash import TextDuplicates
from mindvl_data.curation.duplicates.perceptual import ImageDuplicates
from mindvl_data.curation.pipeline import curate


def _photo(seed: int, size: int = 64, quality: int = 90) -> bytes:
    coarse = np.random.default_rng(seed).integers(0, 255, (6, 6, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def _text(seed: int) -> str:
    return " ".join(f"w{number}" for number in np.random.default_rng(seed).integers(0, 10**6, 40))


@pytest.fixture
def config(tmp_path: Path) -> CurationConfig:
    """Two files with 30 distinct records, and in the second file 2 exact copies, 3 smaller images, 4 texts in capitals,
    and one image of a benchmark."""
    records = [(_photo(seed), _text(seed)) for seed in range(30)]
    records += [records[0], records[1]]
    records += [(_photo(seed, size=48, quality=70), _text(100 + seed)) for seed in (2, 3, 4)]
    records += [(_photo(200 + seed), _text(seed).upper()) for seed in (5, 6, 7, 8)]
    records += [(_photo(300, quality=60), _text(300))]
    for part, chosen in enumerate((records[:15], records[15:])):
        directory = tmp_path / f"in/{part}"
        directory.mkdir(parents=True)
        lines = []
        for number, (image, text) in enumerate(chosen):
            (directory / f"{number}.jpg").write_bytes(image)
            lines.append(json.dumps({"image": f"{part}/{number}.jpg", "caption": text}))
        (tmp_path / f"in/{part}.jsonl").write_text("\n".join(lines))
    (tmp_path / "bench.jpg").write_bytes(_photo(300))
    (tmp_path / "bench.jsonl").write_text(json.dumps({"question": "What?", "image": "bench.jpg"}))
    steps: list[tuple[str, Any]] = [
        ("exact_duplicates", ExactDuplicates()),
        ("image_duplicates", ImageDuplicates()),
        ("text_duplicates", TextDuplicates()),
        ("decontaminate", Decontaminate(benchmarks=(tmp_path / "bench.jsonl",))),
        ("cluster", Cluster(num_clusters=3)),
        ("cluster_exemplars", ClusterExemplars()),
        ("cluster_sample", ClusterSample(share=0.5, floor=1)),
    ]
    return CurationConfig(
        name="pairs",
        inputs=(InputConfig(path=str(tmp_path / "in"), format="jsonl", image_root=tmp_path / "in"),),
        steps=tuple(StepConfig(step=name, parameters=parameters) for name, parameters in steps),
        out=tmp_path / "out",
        output=OutputConfig(samples_per_shard=10),
    )


@pytest.mark.slow
def test_counts_are_those_of_the_input_and_workers_change_nothing(config: CurationConfig, tmp_path: Path) -> None:
    found = curate(config, workers=1)
    dropped = {entry["step"]: entry["dropped"] for entry in found.manifest["steps"]}
    assert dropped == {
        "exact_duplicates": {"exact_duplicate": 2},
        "image_duplicates": {"image_duplicate": 3},
        "text_duplicates": {"text_duplicate": 4},
        "decontaminate": {"contaminated_image": 1},
        "cluster": {},
        "cluster_exemplars": {},
        "cluster_sample": {"over_quota": 15},
    }
    clusters = [json.loads(line) for line in (tmp_path / "out/cache/clusters/clusters.jsonl").read_text().splitlines()]
    assert sum(line["num_records"] for line in clusters) == 30
    for line in clusters:
        assert all((tmp_path / "out/cache/clusters" / name).is_file() for name in line["exemplars"])
    first = [path.read_bytes() for path in sorted((tmp_path / "out/shards").glob("*.tar"))]
    (tmp_path / "out").rename(tmp_path / "first")
    curate(config, workers=2)
    assert first == [path.read_bytes() for path in sorted((tmp_path / "out/shards").glob("*.tar"))]
    assert len(first) == 2
