# SPDX-License-Identifier: Apache-2.0
"""Write what a demo run found as report.json, for machines, and report.html, one page that needs no network.

Last step of the demo, after results.py is filled. Every sentence of the page that judges is derived from the figures
in findings.py, also when they speak against the method.
"""

import base64
import dataclasses
import io
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from mindvl_cli.demo.findings import clock, findings, percent
from mindvl_cli.demo.results import Example, Results, Stage
from mindvl_cli.pages.charts import box_plots, heat_map, line_chart
from mindvl_cli.pages.page import page, section, tile
from mindvl_cli.whole_file import write_whole

QUICK_NOTICE = (
    "Quick run: it trains a little to show that every part works, and claims nothing. Figures are not results."
)


def write_report(results: Results, out_dir: Path) -> Path:
    """Write `report.json` and `report.html` into the directory; returns the path of the page.

    In report.json everything outside the keys "timing" and "machine" is equal for two runs with one seed.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    document = json.dumps(report_document(results, out_dir), indent=2, allow_nan=False)
    write_whole(out_dir / "report.json", document + "\n")
    page = out_dir / "report.html"
    write_whole(page, render(results))
    return page


def report_document(results: Results, out_dir: Path) -> dict[str, Any]:
    """The results as plain JSON, derived figures included; images are named relative to the report."""
    document: dict[str, Any] = {
        "notice": QUICK_NOTICE if results.is_quick else "",
        "findings": findings(results),
        **dataclasses.asdict(results),
    }
    for row, written in zip(results.table.rows, document["table"]["rows"], strict=True):
        written["overall"] = row.overall
    for example, written in zip(results.examples, document["examples"], strict=True):
        written["images"] = [_relative(image, out_dir) for image in example.images]
    document["timing"]["total_s"] = results.timing.total_s
    return document


def render(results: Results) -> str:
    """The whole page as one string, images and styles inside."""
    body = "".join(
        (
            _header(results),
            section("What came out", _findings(results), lead=""),
            section(
                "The stages",
                _time_bar(results) + _curves(results.stages),
                lead="Each time is of the start that finished the stage, without starts that were cut off. Below, loss "
                "per loss token over the steps of each stage that trains; the thin line is every logged step, the "
                "bold one its moving mean.",
            ),
            section("Scores on the test split", _score_table(results), lead=_table_lead(results)),
            section("Resolution search", _search(results), lead=_search_lead(results)),
            section(
                "Test items, as answered",
                _examples(results),
                lead="The first items of each task, right or wrong, as the merged model answers at the chosen setting.",
            ),
            section(
                "Packing and speed",
                _packing_table(results),
                lead="Packing efficiency is the share of positions that are not padding. Visual tokens per pack tell how evenly "
                "images were spread: their mean, maximum, and standard deviation over mean (cv).",
            ),
            section("What ran", _what_ran(results), lead=""),
        )
    )
    title = "mindvl demo, quick" if results.is_quick else "mindvl demo"
    return page(title, body)


def _header(results: Results) -> str:
    notice = f'<p class="notice">{escape(QUICK_NOTICE)}</p>' if results.is_quick else ""
    merged = next((row for row in results.table.rows if row.role == "merged"), None)
    tiles = [
        tile(
            percent(results.headline.score),
            results.headline.title,
            f"{results.headline.num_items} test items; wanted: {percent(results.headline.wanted)}",
        )
    ]
    if merged:
        num_items = sum(task.num_items for task in results.table.tasks)
        tiles.append(tile(percent(merged.overall), "overall, merged model", f"{num_items} test items in all"))
    tiles.append(tile(percent(results.search.test_score), "test score at the chosen resolution", "taken once"))
    cores = f"{results.machine.device}, {results.machine.num_cores} cores"
    tiles.append(tile(clock(results.timing.total_s), "all stages", cores))
    return (
        f"<header>{notice}<h1>mindvl demo</h1><p>Scanned handwritten digits, composed into images of numbers; from "
        "raw files to a merged, searched and exported model, through the commands a user would type.</p>"
        f'<div class="tiles">{"".join(tiles)}</div></header>'
    )


def _findings(results: Results) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in findings(results)) + "</ul>"


def _time_bar(results: Results) -> str:
    """The stages as pieces of one bar, as long as they took."""
    titles = {stage.name: stage.title for stage in results.stages}
    total = results.timing.total_s or 1.0
    pieces, legend = [], []
    for timing in results.timing.stages:
        share = 100 * timing.seconds / total
        pieces.append(f'<i style="width:{share:.2f}%"></i>')
        title = escape(titles.get(timing.stage, timing.stage))
        legend.append(f"<li><span>{title}</span> {clock(timing.seconds)}</li>")
    return f'<div class="timebar">{"".join(pieces)}</div><ol class="legend">{"".join(legend)}</ol>'


def _curves(stages: Sequence[Stage]) -> str:
    figures = []
    for stage in stages:
        if not stage.curve:
            continue
        points = [(float(point.step), point.loss) for point in stage.curve]
        last, peak = stage.curve[-1], max(point.learning_rate for point in stage.curve)
        chart = line_chart(points, x_label="step", describe=f"loss of {stage.title}")
        figures.append(
            f"<figure><figcaption><b>{escape(stage.title)}</b><span>{escape(stage.does)}</span></figcaption>{chart}"
            f"<p>loss {last.loss:.3f} at step {last.step}; highest learning rate {peak:.2g}</p></figure>"
        )
    return f'<div class="curves">{"".join(figures)}</div>' if figures else ""


def _table_lead(results: Results) -> str:
    rows = {row.role for row in results.table.rows}
    merged = " and their average" if "merged" in rows else ""
    return (
        f"In percent, as the paper's Table 6: the SFT models{merged}. The best of each column is bold; n is test items."
    )


def _score_table(results: Results) -> str:
    table = results.table
    best = [max(row.scores[index] for row in table.rows) for index in range(len(table.tasks))]
    best_overall = max(row.overall for row in table.rows)
    head = "".join(f"<th>{escape(task.title)}<small>n = {task.num_items}</small></th>" for task in table.tasks)
    body = []
    for row in table.rows:
        cells = "".join(_score(score, score == top) for score, top in zip(row.scores, best, strict=True))
        overall = _score(row.overall, row.overall == best_overall, "overall")
        body.append(f'<tr class="{row.role}"><th scope="row">{escape(row.model)}</th>{cells}{overall}</tr>')
    return (
        f'<div class="scroll"><table><thead><tr><th>Model</th>{head}<th class="overall">Overall</th></tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _score(score: float, is_best: bool, kind: str = "") -> str:
    text = f"{100 * score:.1f}"
    return f'<td class="{kind}">{f"<b>{text}</b>" if is_best else text}</td>'


def _search_lead(results: Results) -> str:
    return (
        f"Every pair of smallest and largest image size, scored on {results.search.num_validation_items} validation "
        "items. Left, the merged model, with the chosen pair framed; right, every model over all pairs, as the paper's "
        "Figure 4: a model that keeps its score over the whole grid is robust against image size."
    )


def _search(results: Results) -> str:
    search = results.search
    merged = next((model for model in search.models if model.role == "merged"), None)
    figures = []
    if merged:
        chart = heat_map(
            [f"{value:,}" for value in search.min_pixels],
            [f"{value:,}" for value in search.max_pixels],
            merged.scores,
            chosen=(
                search.min_pixels.index(search.chosen_min_pixels),
                search.max_pixels.index(search.chosen_max_pixels),
            ),
            row_title="min pixels",
            column_title="max pixels",
            describe="validation score of the merged model by smallest and largest image size",
        )
        figures.append(f"<figure>{chart}</figure>")
    groups = [
        (model.model, [score for row in model.scores for score in row if score is not None], model.role == "merged")
        for model in search.models
    ]
    figures.append(f"<figure>{box_plots(groups, describe='validation scores of each model over the grid')}</figure>")
    return f'<div class="pair">{"".join(figures)}</div>'


def _examples(results: Results) -> str:
    titles = {task.name: task.title for task in results.table.tasks}
    cards = [_example(example, titles.get(example.task, example.task)) for example in results.examples]
    return f'<div class="examples">{"".join(cards)}</div>' if cards else ""


def _example(example: Example, title: str) -> str:
    images = "".join(f'<img alt="" src="{_inline(image)}">' for image in example.images)
    mark = '<em class="right">right</em>' if example.is_right else '<em class="wrong">wrong</em>'
    truth = "" if example.answer == example.truth else f"<dt>truth</dt><dd>{escape(example.truth)}</dd>"
    return (
        f'<article><div class="images">{images}</div><h3>{escape(title)}{mark}</h3>'
        f"<p>{escape(example.question)}</p>"
        f"<dl><dt>answer</dt><dd>{escape(example.answer) or '<i>nothing</i>'}</dd>{truth}</dl></article>"
    )


def _packing_table(results: Results) -> str:
    speeds = {timing.stage: timing.tokens_per_s for timing in results.timing.stages}
    body = []
    for stage in results.stages:
        packing, speed = stage.packing, speeds.get(stage.name)
        if packing is None:
            continue
        body.append(
            f'<tr><th scope="row">{escape(stage.title)}</th>'
            f"<td>{packing.num_packs:,}</td><td>{packing.num_samples:,}</td>"
            f'<td class="meter" style="--share:{100 * packing.efficiency:.1f}%"><span>{percent(packing.efficiency)}</span></td>'
            f"<td>{packing.visual_tokens_mean:.1f}</td><td>{packing.visual_tokens_max:.0f}</td>"
            f"<td>{packing.visual_tokens_cv:.2f}</td><td>{f'{speed:,.0f}' if speed else '-'}</td></tr>"
        )
    if not body:
        return ""
    head = "".join(
        f"<th>{name}</th>"
        for name in (
            "Stage",
            "Packs",
            "Samples",
            "Packing efficiency",
            "Visual mean",
            "Visual max",
            "Visual cv",
            "Tokens/s",
        )
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _what_ran(results: Results) -> str:
    machine = results.machine
    facts = {
        "seed": str(results.seed),
        "commit": results.commit or "not a git checkout",
        "device": f"{machine.device}, {machine.num_cores} cores, {machine.memory_gib:.0f} GiB",
        "system": machine.platform,
        **machine.versions,
        **({"finished": machine.finished_at} if machine.finished_at else {}),
    }
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f'<dl class="facts">{rows}</dl>{_commands(results.stages)}'


def _commands(stages: Sequence[Stage]) -> str:
    """What a user would type, in order; a stage's recipe is folded away below its command."""
    blocks, lines = [], []
    for stage in stages:
        if stage.command:
            lines.append(stage.command)
        if stage.recipe:
            blocks += [_pre(lines), f"<details><summary>Recipe of {escape(stage.title)}</summary>"]
            blocks += [_pre([stage.recipe]), "</details>"]
            lines = []
    return "".join([*blocks, _pre(lines)])


def _pre(lines: Sequence[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>" if lines else ""


def _inline(image: Path) -> str:
    """The image as a data URL; anything but PNG and JPEG is turned into PNG first."""
    content, kind = image.read_bytes(), image.suffix.lower().lstrip(".").replace("jpg", "jpeg")
    if kind not in ("png", "jpeg"):
        from PIL import Image

        buffer, kind = io.BytesIO(), "png"
        Image.open(image).convert("RGB").save(buffer, format="PNG")
        content = buffer.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def _relative(image: Path, out_dir: Path) -> str:
    try:
        return image.resolve().relative_to(out_dir.resolve()).as_posix()
    except ValueError:
        return image.name  # an image elsewhere: its place would differ between two runs
