# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page for each benchmark: images, question, answer, truth, right or wrong.

Last step of `mindvl eval`; pages/templates/benchmark.html.j2 is the page. Items are taken at equal distances, never by
whether they are right.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from mindvl_cli.pages.render import data_url, render
from mindvl_cli.predictor import DECODER
from mindvl_cli.whole_file import write_whole
from mindvl_merge.evaluation.benchmark import IMAGE_MARK, Benchmark
from mindvl_merge.evaluation.grounding import find_points
from mindvl_merge.evaluation.images import open_image
from mindvl_merge.evaluation.metrics.judged import Judged
from mindvl_merge.evaluation.predict import Predictor
from mindvl_merge.evaluation.predictions import Prediction
from mindvl_merge.evaluation.run import Evaluation

MAX_ITEMS = 60
MAX_SIDE = 320  # pixels of an embedded image

REPORT_NAME = "report.json"
JUDGED_NAME = "judged.jsonl"  # items with the prompts and the replies of the judge
CACHE_NAME = "predictions.jsonl"


def write_evaluation(
    out: Path,
    document: Mapping[str, Any],
    evaluation: Evaluation | None,
    benchmarks: Sequence[Benchmark],
    predictor: Predictor,
) -> None:
    """Write `report.json`, which has `document` and the model's fingerprint, and `NAME.html` of every benchmark.

    If a judge was asked, `judged.jsonl` has its prompts and replies with the score of each item.
    """
    start = 0
    for benchmark in benchmarks if evaluation else ():
        assert evaluation is not None
        stop = start + len(benchmark.items)
        write_page(
            out / f"{benchmark.name}.html",
            name=benchmark.name,
            predictions=evaluation.predictions[start:stop],
            scores=evaluation.item_scores[start:stop],
            judged=evaluation.judged[start:stop],
            judge=f"{document['judge']['model']} at {document['judge']['url']}" if "judge" in document else "",
        )
        start = stop
    if evaluation and any(evaluation.judged):
        _write_judged(out / JUDGED_NAME, document, evaluation, benchmarks)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / REPORT_NAME, json.dumps({**document, "fingerprint": predictor.fingerprint}, indent=2) + "\n")


def _write_judged(
    path: Path, document: Mapping[str, Any], evaluation: Evaluation, benchmarks: Sequence[Benchmark]
) -> None:
    names = [benchmark.name for benchmark in benchmarks for _ in benchmark.items]
    rows = [
        {
            "benchmark": name,
            "id": prediction.item.id,
            "answer": prediction.answer,
            "score": judged.score,
            "is_failed": judged.is_failed,
            "judge": document.get("judge"),
            "judgements": [asdict(one) for one in judged.judgements],
        }
        for name, prediction, judged in zip(names, evaluation.predictions, evaluation.judged, strict=True)
        if judged
    ]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_page(
    path: Path,
    *,
    name: str,
    predictions: Sequence[Prediction],
    scores: Sequence[float],
    judged: Sequence[Judged | None] = (),
    judge: str = "",
) -> None:
    """Write the page of one benchmark; at most `MAX_ITEMS` items are shown.

    Args:
        judged: Of each prediction, the judgements that its score follows from.
        judge: Model and server of the judge, for the page.
    """
    groups: dict[str, list[float]] = {}
    for prediction, score in zip(predictions, scores, strict=True):
        groups.setdefault(prediction.item.task, []).append(score)
    page = render(
        "benchmark",
        title=name,
        tasks=[(task, f"{sum(values) / len(values):.1%}", len(values)) for task, values in groups.items()],
        num_items=len(predictions),
        judge=judge if any(judged) else "",
        num_failed=sum(one.is_failed for one in judged if one),
        items=[
            {**_item(predictions[place], scores[place]), "judged": judged[place] if judged else None}
            for place in even_choice(len(predictions), MAX_ITEMS)
        ],
    )
    write_whole(path, page)


def even_choice(count: int, most: int) -> list[int]:
    """At most `most` of `count` positions, at even distances."""
    return list(range(count)) if count <= most else [i * count // most for i in range(most)]


def _item(prediction: Prediction, score: float) -> dict[str, object]:
    item = prediction.item
    images = [open_image(path, DECODER) for path in item.images]
    if images and item.box is not None:
        _draw_boxes(images[0], prediction)
    for image in images:
        image.thumbnail((MAX_SIDE, MAX_SIDE))
    return {
        "id": item.id,
        "task": item.task,
        "is_right": bool(score),
        "score": f"{score:g}",
        "images": [data_url(image) for image in images],
        "question": item.question.replace(IMAGE_MARK, "").strip(),
        "answer": prediction.answer,
        "truth": item.answer if item.score == "exact" else f"box {', '.join(f'{value:g}' for value in item.box or ())}",
    }


def _draw_boxes(image: Image.Image, prediction: Prediction) -> None:
    """Draw the true box in green, and the box or the point of the answer in red."""
    draw = ImageDraw.Draw(image)
    draw.rectangle(prediction.item.box, outline=(47, 143, 91))  # type: ignore[arg-type]
    points = find_points(prediction.answer, original=prediction.original[0], unit=prediction.units[0])
    if len(points) == 2 and points[0][0] <= points[1][0] and points[0][1] <= points[1][1]:
        draw.rectangle((*points[0], *points[1]), outline=(194, 69, 58))
    for x, y in points[:1] if len(points) == 1 else []:
        draw.ellipse((x - 2, y - 2, x + 2, y + 2), fill=(194, 69, 58))
