# SPDX-License-Identifier: Apache-2.0
"""Embedding duplicates against all pairs."""

import io
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindvl_data.curation.duplicates import embedding
from mindvl_data.curation.duplicates.embedding import STEP, EmbeddingDuplicates
from mindvl_data.curation.record import Record


def _vectors(seed: int, count: int) -> np.ndarray:
    """Unit vectors around a few centers, in half precision as they are stored."""
    generator = np.random.default_rng(seed)
    centers = generator.normal(size=(8, 16))
    points = centers[generator.integers(0, 8, count)] + 0.35 * generator.normal(size=(count, 16))
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype("f2").astype("f4")


@pytest.mark.parametrize("cluster_rows", [10_000, 40])
def test_groups_are_those_of_all_pairs(cluster_rows: int, decide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = _vectors(1, 150)
    monkeypatch.setattr(embedding, "CLUSTER_ROWS", cluster_rows)
    monkeypatch.setattr(embedding, "_TILE", 37)
    monkeypatch.setattr(embedding, "embed", lambda record, model, context: vectors[record.number])
    records = [Record(number=number, id="", body={}, media=(b"",)) for number in range(150)]
    found = decide(STEP, EmbeddingDuplicates(similarity=0.95), records)
    names = list(range(150))
    for i, j in combinations(range(150), 2):
        if vectors[i] @ vectors[j] >= 0.95:
            low, high = sorted((names[i], names[j]))
            names = [low if name == high else name for name in names]
    kept = {number: f"same as 0:{name}" for number, name in enumerate(names) if name != number}
    assert 10 < len(kept) < 140
    assert {number: d.drop.value for number, d in found.items() if d.drop} == kept


def test_a_darker_copy_is_found_and_images_of_one_color_are_not_compared(decide: Any) -> None:
    photo = np.random.default_rng(0).integers(0, 255, (6, 6, 3), np.uint8)
    images = [photo, photo[::-1], (photo * 0.6).astype(np.uint8), np.full_like(photo, 9), np.full_like(photo, 9)]
    records = []
    for number, pixels in enumerate(images):
        buffer = io.BytesIO()
        Image.fromarray(pixels).resize((64, 64), Image.Resampling.BICUBIC).save(buffer, "PNG")
        records.append(Record(number=number, id="", body={}, media=(buffer.getvalue(),)))
    found = decide(STEP, EmbeddingDuplicates(), records)
    assert {number: d.drop.value for number, d in found.items() if d.drop} == {2: "same as 0:0"}


def test_the_similarity_must_be_possible() -> None:
    with pytest.raises(ValueError, match="similarity: "):
        EmbeddingDuplicates(similarity=1.2)
