# SPDX-License-Identifier: Apache-2.0
"""Score one model on benchmarks, or at every cell of a resolution grid.

Comes after benchmark.py and predict.py; the commands write reports and pages from the results.
"""

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mindvl_merge.evaluation.benchmark import Benchmark, Item
from mindvl_merge.evaluation.grounding import Scores, gather, score_answer
from mindvl_merge.evaluation.predict import Prediction, Predictor, Progress, Question
from mindvl_merge.evaluation.resolution import ResolutionGrid
from mindvl_merge.evaluation.search import Request, ResolutionSearch, search_resolution


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores and answers of a model."""

    min_pixels: int
    max_pixels: int
    scores: Scores  # over all benchmarks
    by_benchmark: dict[str, Scores]
    predictions: tuple[Prediction, ...]  # in the order of benchmarks and items
    item_scores: tuple[float, ...]  # of each prediction

    def report(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            **asdict(self.scores),
            "by_benchmark": {name: asdict(scores) for name, scores in self.by_benchmark.items()},
        }


def evaluate(
    predictor: Predictor,
    benchmarks: Sequence[Benchmark],
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Answer and score all items.

    Args:
        min_pixels, max_pixels: Limits of the image area in pixels; None means those of the processor.
    """
    items = [item for benchmark in benchmarks for item in benchmark.items]
    questions = predictor.questions(items, min_pixels=min_pixels, max_pixels=max_pixels)
    predictions = predictor.predict(questions, progress=progress)
    scores = [score_prediction(prediction) for prediction in predictions]
    by_benchmark: dict[str, Scores] = {}
    start = 0
    for benchmark in benchmarks:
        stop = start + len(benchmark.items)
        by_benchmark[benchmark.name] = gather(benchmark.items, scores[start:stop])
        start = stop
    return Evaluation(
        min_pixels=questions[0].min_pixels,
        max_pixels=questions[0].max_pixels,
        scores=gather(items, scores),
        by_benchmark=by_benchmark,
        predictions=tuple(predictions),
        item_scores=tuple(scores),
    )


def score_prediction(prediction: Prediction) -> float:
    """1.0 if the answer is correct, else 0.0."""
    has_images = bool(prediction.original)
    return score_answer(
        prediction.item,
        prediction.answer,
        original=prediction.original[0] if has_images else None,
        resized=prediction.resized[0] if has_images else None,
    )


class PredictorScorer:
    """Implements search.Scorer with a Predictor."""

    def __init__(self, predictor: Predictor, progress: Progress | None = None) -> None:
        self.predictor = predictor
        self.progress = progress

    def resized(self, item: Item, min_pixels: int, max_pixels: int) -> Hashable:
        """Sizes of the item's images after resizing."""
        return self.predictor.sizes(item, min_pixels, max_pixels)

    def score(self, requests: Sequence[Request[Item]]) -> list[float]:
        """Answer and score all requests."""
        questions = [Question(item=r.item, min_pixels=r.min_pixels, max_pixels=r.max_pixels) for r in requests]
        return [score_prediction(p) for p in self.predictor.predict(questions, progress=self.progress)]


def search_model(
    predictor: Predictor, items: Sequence[Item], grid: ResolutionGrid, *, progress: Progress | None = None
) -> ResolutionSearch:
    """Score every cell of the grid on held-out items, each distinct resize once, and choose one."""
    scorer = PredictorScorer(predictor, progress)
    return search_resolution(scorer, items, grid, tasks=[item.task for item in items])
