# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page per benchmark: images, question, answer, truth, right or wrong.

Comes last in an evaluation. Items are taken at even distances, never by whether they are right.
"""

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from mindvl_cli.evaluation.benchmark import IMAGE_MARK
from mindvl_cli.evaluation.predict import Prediction, open_image
from mindvl_cli.evaluation.score import find_points
from mindvl_cli.whole_file import write_whole

MAX_ITEMS = 60
MAX_SIDE = 320  # pixels of an embedded image

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1c2430; }
h1 { font-size: 1.4rem; } table { border-collapse: collapse; margin-bottom: 1.5rem; }
td, th { padding: .2rem .9rem .2rem 0; text-align: left; }
.items { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1rem; }
.item { border: 1px solid #d5dae2; border-left: 5px solid #2f8f5b; border-radius: 6px; padding: .7rem .9rem; }
.item.wrong { border-left-color: #c2453a; } img { max-width: 100%; max-height: 12rem; display: block; margin-bottom:
.4rem; } .id { color: #6a7482; font-size: .8rem; } b { font-weight: 600; } p { margin: .2rem 0; overflow-wrap:
anywhere; } @media (prefers-color-scheme: dark) { body { background: #14181f; color: #dfe4ea; } .item { border-color:
#38404c; } }
"""


def write_page(path: Path, *, name: str, predictions: Sequence[Prediction], scores: Sequence[float]) -> None:
    """Write the page of one benchmark; at most `MAX_ITEMS` items are shown."""
    shown = even_choice(len(predictions), MAX_ITEMS)
    groups: dict[str, list[float]] = {}
    for prediction, score in zip(predictions, scores, strict=True):
        groups.setdefault(prediction.item.task, []).append(score)
    rows = "".join(
        f"<tr><td>{escape(task)}</td><td>{100 * sum(values) / len(values):.1f} %</td><td>{len(values)}</td></tr>"
        for task, values in groups.items()
    )
    cards = "".join(_card(predictions[i], scores[i]) for i in shown)
    write_whole(
        path,
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(name)}</h1>"
        f"<table><tr><th>task</th><th>right</th><th>items</th></tr>{rows}</table>"
        f"<p>{len(shown)} of {len(predictions)} items, at even distances.</p>"
        f'<div class="items">{cards}</div></body></html>\n',
    )


def even_choice(count: int, most: int) -> list[int]:
    """At most `most` of `count` positions, at even distances."""
    return list(range(count)) if count <= most else [i * count // most for i in range(most)]


def _card(prediction: Prediction, score: float) -> str:
    item = prediction.item
    images = "".join(
        f'<img alt="image {number}" src="{_data_uri(image, prediction if number == 0 else None)}">'
        for number, image in enumerate(item.images)
    )
    truth = item.answer if item.score == "exact" else f"box {', '.join(f'{value:g}' for value in item.box or ())}"
    return (
        f'<div class="item{"" if score else " wrong"}">{images}'
        f"<p>{escape(item.question.replace(IMAGE_MARK, '').strip())}</p>"
        f"<p><b>{escape(prediction.answer) or '(nothing)'}</b> {'right' if score else 'wrong'}</p>"
        f"<p>truth: {escape(truth)}</p>"
        f'<p class="id">{escape(item.id)} {escape(item.task)}</p></div>'
    )


def _data_uri(path: Path, marked: Prediction | None) -> str:
    from PIL import ImageDraw

    image = open_image(path)
    if marked is not None and marked.item.box is not None:
        draw = ImageDraw.Draw(image)
        draw.rectangle(marked.item.box, outline=(47, 143, 91))
        points = find_points(marked.answer, original=marked.original[0], resized=marked.resized[0])
        if len(points) == 2 and points[0][0] <= points[1][0] and points[0][1] <= points[1][1]:
            draw.rectangle((*points[0], *points[1]), outline=(194, 69, 58))
        for x, y in points[:1] if len(points) == 1 else []:
            draw.ellipse((x - 2, y - 2, x + 2, y + 2), fill=(194, 69, 58))
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
