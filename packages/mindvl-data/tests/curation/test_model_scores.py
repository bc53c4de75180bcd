# SPDX-License-Identifier: Apache-2.0
"""Steps with scores of models: which records are dropped, marked or kept."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mindvl_data.curation import model_scores
from mindvl_data.curation.model_scores import ClipScore, ImageScore, NsfwScore, clip_similarity, image_score, nsfw_score
from mindvl_data.curation.record import Record
from mindvl_data.curation.scorers import Item
from mindvl_data.curation.step import Context, Drop


class _BySize:
    """Scores an image by its number of bytes, in tenths."""

    def __init__(self, *arguments: object) -> None:
        self.texts: list[str] = []

    def score(self, items: Sequence[Item]) -> list[float]:
        self.texts += [item.text for item in items]
        return [len(item.record.media[item.index]) / 10 for item in items]


def records(*media: tuple[int, ...]) -> list[Record]:
    return [
        Record(number=number, id="", body={"content": f"text {number}"}, media=tuple(b"\0" * size for size in sizes))
        for number, sizes in enumerate(media)
    ]


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    for name in ("ClipSimilarity", "ImageClassifier", "OnnxScorer", "NudeNet"):
        monkeypatch.setattr(model_scores, name, _BySize)
    return Context(seed=0, cache=Path())


def test_pairs_of_low_similarity_are_dropped_and_the_worst_image_counts(context: Context) -> None:
    batch = records((3,), (2,), (), (9, 1))
    outcomes = clip_similarity(batch, ClipScore(model=Path("clip")), context)
    assert [outcome.reason if isinstance(outcome, Drop) else None for outcome in outcomes] == [
        None, "low_similarity", None, "low_similarity",
    ]  # fmt: skip
    assert [outcome.facts for outcome in outcomes if not isinstance(outcome, list)] == [
        {"clip_similarity": 0.3}, {"clip_similarity": 0.2}, {}, {"clip_similarity": 0.1},
    ]  # fmt: skip


def test_without_a_limit_every_pair_is_kept_with_its_similarity_for_a_new_caption(context: Context) -> None:
    config = ClipScore(model=Path("clip"), min_similarity=None)
    outcomes: list[Any] = list(clip_similarity(records((3,), (2,), ()), config, context))
    assert [outcome.facts for outcome in outcomes] == [{"clip_similarity": 0.3}, {"clip_similarity": 0.2}, {}]


def test_a_score_has_the_name_and_the_limits_of_its_configuration(context: Context) -> None:
    low = ImageScore(name="aesthetic", transformers=Path("a"), min_score=0.4)
    outcomes: list[Any] = list(image_score(records((5, 9), (3,)), low, context))
    assert outcomes[0].facts == {"aesthetic_score": 0.5}
    assert outcomes[1] == Drop("low_score", value=0.3, facts={"aesthetic_score": 0.3})
    high = ImageScore(name="watermark", onnx=Path("w.onnx"), max_score=0.8)
    outcomes = list(image_score(records((5, 9)), high, context))
    assert outcomes == [Drop("high_score", value=0.9, facts={"watermark_score": 0.9})]


def test_nudity_is_dropped_above_the_highest_score(context: Context) -> None:
    outcomes: list[Any] = list(nsfw_score(records((5,), (6,)), NsfwScore(), context))
    assert outcomes[0].facts == {"nsfw_score": 0.5}
    assert outcomes[1] == Drop("nudity", value=0.6, facts={"nsfw_score": 0.6})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"name": "a b", "onnx": Path("m")}, "name: 'a b' is not a name"),
        ({"name": "a"}, "0 of them are given"),
        ({"name": "a", "onnx": Path("m"), "transformers": Path("m")}, "2 of them are given"),
        ({"name": "a", "onnx": Path("m"), "min_score": 2.0, "max_score": 1.0}, "min_score: 2.0 is larger"),
        ({"name": "a", "onnx": Path("m"), "batch_size": 0}, "batch_size: must be at least 1"),
    ],
)
def test_a_score_without_exactly_one_model_or_with_an_empty_range_is_refused(
    parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ImageScore(**parameters)
