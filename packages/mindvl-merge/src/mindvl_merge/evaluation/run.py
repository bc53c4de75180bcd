# SPDX-License-Identifier: Apache-2.0
"""Score one model on benchmarks, or at every cell of a resolution grid.

Comes after benchmark.py and predict.py; the commands write reports and pages from the results.
"""

from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import nan
from statistics import fmean
from typing import Any

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.benchmark import Benchmark, Item
from mindvl_merge.evaluation.grounding import Scores, TaskScore, gather, score_answer
from mindvl_merge.evaluation.metrics import aggregate, find_metric, score
from mindvl_merge.evaluation.metrics.judged import Judge, Judged, judge_item
from mindvl_merge.evaluation.metrics.options import read_compat, read_references
from mindvl_merge.evaluation.predict import Predictor, Progress
from mindvl_merge.evaluation.predictions import Prediction, Question
from mindvl_merge.evaluation.resolution import ResolutionGrid
from mindvl_merge.evaluation.search import Request, ResolutionSearch, search_resolution


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores and answers of a model."""

    compat: str

    min_pixels: int
    max_pixels: int
    scores: Scores  # over all benchmarks
    by_benchmark: dict[str, Scores]
    metrics: dict[str, dict[str, float]]  # by benchmark: scores from 0 to 100, or points, by name
    predictions: tuple[Prediction, ...]  # in the order of benchmarks and items
    item_scores: tuple[float, ...]  # of each prediction
    judged: tuple[Judged | None, ...]  # of each prediction; None where no judge was asked
    # By benchmark that needs a judge: its items without a valid judgement, which score 0.
    failed_judgements: dict[str, int]

    def report(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "compat": self.compat,
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            **asdict(self.scores),
            "by_benchmark": {name: asdict(scores) for name, scores in self.by_benchmark.items()},
            "metrics": self.metrics,
            **({"failed_judgements": self.failed_judgements} if self.failed_judgements else {}),
        }


def evaluate(
    predictor: Predictor,
    benchmarks: Sequence[Benchmark],
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    compat: str = "vlmevalkit",
    judge: Judge | None = None,
    num_judge_workers: int = 1,
    progress: Progress | None = None,
) -> Evaluation:
    """Answer and score all items.

    Args:
        min_pixels, max_pixels: Limits of the image area in pixels; None means those of the processor.
        compat: Project whose rules score the answers.
        judge: Answers the prompts of the metrics that need a judge; called in several threads.
        num_judge_workers: Number of these threads.

    Raises:
        EvaluationError: A benchmark needs a judge and there is none, or two have the same name.
    """
    _require_names(benchmarks)
    _require_judge(benchmarks, judge)
    for benchmark in benchmarks:
        if benchmark.kind is not None:  # a missing group is reported before a question is asked
            _aggregated(benchmark, benchmark.kind, [0.0] * len(benchmark.items), compat)
    items = [item for benchmark in benchmarks for item in benchmark.items]
    questions = predictor.questions(items, min_pixels=min_pixels, max_pixels=max_pixels)
    predictions = predictor.predict(questions, progress=progress)
    judged = _judge_all(predictions, compat, judge, num_judge_workers)
    scores = [
        score_prediction(prediction, compat=compat) if one is None else one.score
        for prediction, one in zip(predictions, judged, strict=True)
    ]
    by_benchmark: dict[str, Scores] = {}
    metrics: dict[str, dict[str, float]] = {}
    failed: dict[str, int] = {}
    start = 0
    for benchmark in benchmarks:
        stop = start + len(benchmark.items)
        by_benchmark[benchmark.name] = gather(benchmark.items, scores[start:stop])
        if benchmark.kind is not None:
            found = _aggregated(benchmark, benchmark.kind, scores[start:stop], compat, judged[start:stop])
            metrics[benchmark.name] = found
            by_benchmark[benchmark.name] = _as_task(benchmark, found["overall"])
        if any(judged[start:stop]):
            failed[benchmark.name] = sum(one.is_failed for one in judged[start:stop] if one)
        start = stop
    return Evaluation(
        compat=compat,
        min_pixels=questions[0].min_pixels,
        max_pixels=questions[0].max_pixels,
        scores=_joined(list(by_benchmark.values())),
        by_benchmark=by_benchmark,
        metrics=metrics,
        predictions=tuple(predictions),
        item_scores=tuple(scores),
        judged=tuple(judged),
        failed_judgements=failed,
    )


def score_prediction(prediction: Prediction, *, compat: str = "vlmevalkit") -> float:
    """Score of an answer from 0 to 1, without a judge."""
    item = prediction.item
    if item.metric is not None:
        return score(item.metric, prediction.answer, _references(item), compat, **item.options)
    has_images = bool(prediction.original)
    return score_answer(
        prediction.item,
        prediction.answer,
        original=prediction.original[0] if has_images else None,
        unit=prediction.units[0] if has_images else None,
    )


def _judge_all(
    predictions: Sequence[Prediction], compat: str, judge: Judge | None, num_workers: int
) -> list[Judged | None]:
    """What the judge says about each answer; None for answers that need none."""

    def judged(prediction: Prediction) -> Judged | None:
        item = prediction.item
        metric = None if item.metric is None else find_metric(item.metric)
        if judge is None or metric is None or not metric.needs_judge or item.options.get("judgement") is not None:
            return None
        references = read_references(_references(item), has_lists=metric.has_lists)
        question = str(item.options.get("question", item.question))
        return judge_item(
            metric.name, prediction.answer, references, read_compat(compat), question=question, judge=judge
        )

    with ThreadPoolExecutor(num_workers) as pool:
        futures = [pool.submit(judged, prediction) for prediction in predictions]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)  # judgements under way are kept by the judge's cache
            raise


def _references(item: Item) -> Any:
    return item.answer if item.references is None else item.references


def _require_names(benchmarks: Sequence[Benchmark]) -> None:
    names = [benchmark.name for benchmark in benchmarks]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise EvaluationError(f"--benchmark: two benchmarks have the name {repeated!r}. Rename one of the files.")


def _require_judge(benchmarks: Sequence[Benchmark], judge: Judge | None) -> None:
    for benchmark in benchmarks:
        judged = _judged_metrics(benchmark.items)
        if judged and judge is None:
            raise EvaluationError(
                f"{benchmark.name}: {judged[0]} needs a judge. Evaluate this benchmark with a judge endpoint."
            )


def _judged_metrics(items: Sequence[Item]) -> list[str]:
    return sorted({item.metric for item in items if item.metric and find_metric(item.metric).needs_judge})


def _aggregated(
    benchmark: Benchmark, kind: str, scores: Sequence[float], compat: str, judged: Sequence[Judged | None] = ()
) -> dict[str, float]:
    fields = [one.fields if one else {} for one in judged] or [{}] * len(scores)
    records = [
        {**item.fields, **own, "score": score} for item, own, score in zip(benchmark.items, fields, scores, strict=True)
    ]
    return aggregate(kind, records, compat)


def _as_task(benchmark: Benchmark, overall: float) -> Scores:
    task = TaskScore(score=overall / 100, num_items=len(benchmark.items))
    return Scores(overall=task.score, by_task={benchmark.name: task})


def _joined(parts: Sequence[Scores]) -> Scores:
    """The unweighted mean over the tasks of all benchmarks; a task in several benchmarks is joined by its items."""
    joined: dict[str, TaskScore] = {}
    for name, task in ((name, task) for part in parts for name, task in part.by_task.items()):
        other = joined.get(name)
        if other is not None:
            count = other.num_items + task.num_items
            total = other.score * other.num_items + task.score * task.num_items
            task = TaskScore(score=total / count, num_items=count)
        joined[name] = task
    return Scores(overall=fmean(task.score for task in joined.values()), by_task=joined)


class PredictorScorer:
    """Implements search.Scorer with a Predictor."""

    def __init__(self, predictor: Predictor, compat: str = "vlmevalkit", progress: Progress | None = None) -> None:
        self.predictor = predictor
        self.compat = compat
        self.progress = progress

    def resized(self, item: Item, min_pixels: int, max_pixels: int) -> Hashable:
        """Sizes of the item's images after resizing."""
        return self.predictor.sizes(item, min_pixels, max_pixels)

    def num_visual_tokens(self, item: Item, min_pixels: int, max_pixels: int) -> int:
        """Visual tokens of the item's images after resizing."""
        sizes = self.predictor.sizes(item, min_pixels, max_pixels)
        return sum(height * width for height, width in sizes) // self.predictor.multiple**2

    def score(self, requests: Sequence[Request[Item]]) -> list[float]:
        """Answer and score all requests."""
        return [score for score, _ in self.score_timed(requests)]

    def score_timed(self, requests: Sequence[Request[Item]]) -> list[tuple[float, float]]:
        """Answer and score all requests, with the seconds that each answer took."""
        questions = [Question(item=r.item, min_pixels=r.min_pixels, max_pixels=r.max_pixels) for r in requests]
        return [
            (score_prediction(found, compat=self.compat), nan if found.seconds is None else found.seconds)
            for found in self.predictor.predict(questions, progress=self.progress)
        ]


def search_model(
    predictor: Predictor,
    items: Sequence[Item],
    grid: ResolutionGrid,
    *,
    compat: str = "vlmevalkit",
    halving: bool = False,
    report_share: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> ResolutionSearch:
    """Score the cells of the grid on held-out items, each distinct resize once, and choose one for all tasks and one for each.

    Args:
        grid: Counted in visual tokens of the model, unless it has `unit_pixels`.
        halving, report_share, seed: As in `search_resolution`.

    Raises:
        EvaluationError: A task needs a judge.
    """
    judged = _judged_metrics(items)
    if judged:
        raise EvaluationError(f"{judged[0]}: the search cannot use a judge. Search on benchmarks that need none.")
    scorer = PredictorScorer(predictor, compat, progress)
    grid = grid.for_model(predictor.multiple)
    tasks = [item.task for item in items]
    return search_resolution(scorer, items, grid, tasks=tasks, halving=halving, report_share=report_share, seed=seed)
