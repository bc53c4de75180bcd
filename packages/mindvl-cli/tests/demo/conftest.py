# SPDX-License-Identifier: Apache-2.0
"""Made-up demo results for the tests of the report: every part filled, no training behind them."""

import math
import random
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from mindvl_cli.demo.results import (
    CurvePoint,
    Example,
    GridScores,
    Headline,
    Machine,
    Packing,
    ResolutionSearch,
    Results,
    ScoreTable,
    Stage,
    StageTiming,
    TableRow,
    Task,
    Timing,
)

TASKS = (
    Task(name="read", title="Read the number", num_items=400),
    Task(name="count", title="How many digits", num_items=200),
    Task(name="compare", title="Larger of two", num_items=200),
    Task(name="ground", title="Point or box", num_items=200),
    Task(name="arithmetic", title="Arithmetic", num_items=200),
)
PARENTS = ("SFT 192", "SFT 256", "SFT 384")


def _curve(steps: int, start: float, end: float, rng: random.Random) -> tuple[CurvePoint, ...]:
    points = []
    for step in range(5, steps + 1, 5):
        loss = end + (start - end) * math.exp(-4 * step / steps) + rng.uniform(-0.04, 0.04) * start
        rate = 1e-3 * min(1, 10 * step / steps) * 0.5 * (1 + math.cos(math.pi * step / steps))
        points.append(CurvePoint(step=step, loss=max(loss, 0.005), learning_rate=rate))
    return tuple(points)


def _grid(center: float, slope: float) -> tuple[tuple[float | None, ...], ...]:
    return tuple(
        tuple(
            None if i == 3 and j == 0 else round(center - slope * abs(j - 3) - 0.6 * slope * abs(i - 1), 4)
            for j in range(6)
        )
        for i in range(4)
    )


@pytest.fixture
def results(tmp_path: Path) -> Results:
    rng = random.Random(7)
    packing = Packing(
        num_packs=2400,
        num_samples=31234,
        efficiency=0.9961,
        visual_tokens_mean=141.3,
        visual_tokens_max=168,
        visual_tokens_cv=0.083,
    )
    training = [
        ("backbone-vision", "Vision backbone", "single digits; its head is thrown away", 300, 2.3, 0.08, False),
        ("backbone-language", "Language backbone", "the text-only tasks", 400, 5.5, 0.4, True),
        ("warmup", "Warm-up", "projector only", 200, 3.1, 1.6, True),
        ("multitask", "Multitask", "all parameters, 8:2 with text", 900, 1.7, 0.12, True),
        ("sft-192", "SFT, 192 tokens", "all parameters, 1:1 with text", 300, 0.3, 0.06, True),
        ("sft-256", "SFT, 256 tokens", "all parameters, 1:1 with text", 300, 0.3, 0.05, True),
        ("sft-384", "SFT, 384 tokens", "all parameters, 1:1 with text", 300, 0.3, 0.05, True),
    ]
    stages = [
        Stage(
            name="data", title="Data", does="composes and packs", command="mindvl data write source.json --out shards"
        ),
        *(
            Stage(
                name=name,
                title=title,
                does=does,
                command=f"mindvl train recipes/{name}.yaml",
                curve=_curve(steps, start, end, rng),
                packing=packing if packed else None,
            )
            for name, title, does, steps, start, end, packed in training
        ),
        Stage(name="merge", title="Merge", does="averages the three", command="mindvl merge a b c --out merged"),
        Stage(name="search", title="Search", does="tries image sizes", command="mindvl search-resolution merged"),
    ]
    rows = [
        *(
            TableRow(
                model=model, role="parent", scores=(0.905 + 0.01 * i, 0.97, 0.9 + 0.005 * i, 0.82, 0.94 - 0.01 * i)
            )
            for i, model in enumerate(PARENTS)
        ),
        TableRow(model="Merged", role="merged", scores=(0.9375, 0.985, 0.92, 0.845, 0.95)),
    ]
    grids = [
        *(
            GridScores(model=model, role="parent", scores=_grid(0.88 + 0.02 * i, 0.02))
            for i, model in enumerate(PARENTS)
        ),
        GridScores(model="Merged", role="merged", scores=_grid(0.935, 0.012)),
    ]
    examples = []
    for index, (task, question, answer, truth) in enumerate(
        (
            ("read", "Read the number.", "4071", "4071"),
            ("count", "How many digits are there?", "6", "5"),
            ("compare", "Which number is larger, the first or the second?", "first", "first"),
            ("ground", "Give the box of the digit 7.", "[31, 8, 52, 40]", "[30, 8, 52, 41]"),
            ("arithmetic", "17 + 25 =", "42", "42"),
        )
    ):
        images = []
        for number in range(0 if task == "arithmetic" else 2 if task == "compare" else 1):
            image = Image.new("L", (168, 56), 255)
            ImageDraw.Draw(image).text((20, 8), str(4071 + number), fill=0, font_size=36)
            images.append(tmp_path / "images" / f"{index}-{number}.png")
            images[-1].parent.mkdir(exist_ok=True)
            image.save(images[-1])
        examples.append(
            Example(
                task=task,
                images=tuple(images),
                question=question,
                answer=answer,
                truth=truth,
                is_right=index not in (1,),
            )
        )
    seconds = (9, 40, 55, 35, 210, 70, 72, 80, 2, 65)
    timings = [
        StageTiming(stage=stage.name, seconds=s, tokens_per_s=5210.0 + s if stage.packing else None)
        for stage, s in zip(stages, seconds, strict=True)
    ]
    return Results(
        seed=1,
        is_quick=False,
        commit="0123abc",
        headline=Headline(title="Unseen three-digit numbers read exactly", score=0.932, num_items=500, wanted=0.9),
        stages=tuple(stages),
        table=ScoreTable(tasks=TASKS, rows=tuple(rows)),
        search=ResolutionSearch(
            min_pixels=(784, 3136, 6272, 12544),
            max_pixels=(6272, 9408, 12544, 18816, 25088, 50176),
            models=tuple(grids),
            chosen_min_pixels=3136,
            chosen_max_pixels=18816,
            validation_score=0.935,
            test_score=0.931,
            num_validation_items=300,
        ),
        examples=tuple(examples),
        timing=Timing(stages=tuple(timings)),
        machine=Machine(
            device="CPU",
            num_cores=2,
            memory_gib=24,
            platform="Linux x86_64",
            versions={"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "mindvl": "0.1.0"},
            finished_at="2026-01-02T03:04:05",
        ),
    )
