# SPDX-License-Identifier: Apache-2.0
"""Score one model on benchmarks: predictions, scores by task, report.json and a page per benchmark.

Called by `mindvl eval` and by the demo; comes after the export.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindvl_cli.evaluation.benchmark import Benchmark
from mindvl_cli.evaluation.page import write_page
from mindvl_cli.evaluation.predict import Prediction, Predictor, Progress
from mindvl_cli.evaluation.score import Scores, gather, score_answer
from mindvl_cli.whole_file import write_whole

REPORT_NAME = "report.json"
CACHE_NAME = "predictions.jsonl"


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
    out: Path | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Answer and score all items.

    Args:
        min_pixels, max_pixels: Limits of the image area in pixels; None means those of the processor.
        out: Directory for `report.json` and `NAME.html` of every benchmark; None writes nothing.
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
        if out is not None:
            page = out / f"{benchmark.name}.html"
            write_page(page, name=benchmark.name, predictions=predictions[start:stop], scores=scores[start:stop])
        start = stop
    evaluation = Evaluation(
        min_pixels=questions[0].min_pixels,
        max_pixels=questions[0].max_pixels,
        scores=gather(items, scores),
        by_benchmark=by_benchmark,
        predictions=tuple(predictions),
        item_scores=tuple(scores),
    )
    if out is not None:
        document = {"model": str(predictor.directory), "fingerprint": predictor.fingerprint, **evaluation.report()}
        write_whole(out / REPORT_NAME, json.dumps(document, indent=2) + "\n")
    return evaluation


def score_prediction(prediction: Prediction) -> float:
    """1.0 if the answer is correct, else 0.0."""
    has_images = bool(prediction.original)
    return score_answer(
        prediction.item,
        prediction.answer,
        original=prediction.original[0] if has_images else None,
        resized=prediction.resized[0] if has_images else None,
    )
