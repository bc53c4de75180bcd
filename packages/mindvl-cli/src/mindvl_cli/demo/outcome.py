# SPDX-License-Identifier: Apache-2.0
"""Collect the records of the stages as Results, the input of the report.

Comes after pipeline.py, before report.py.
"""

import datetime
import platform
from pathlib import Path
from typing import Any

from mindvl_cli import machine
from mindvl_cli.demo.pipeline import ANSWER_OPTIONS, DemoRun, models, sft_phases
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
from mindvl_cli.demo.settings import BLOCK
from mindvl_cli.demo.tasks import BENCHMARK_TASKS
from mindvl_train.metrics.commit import commit

WANTED = 0.9  # share of unseen three-digit numbers read exactly
EXAMPLES_PER_TASK = 2

TASK_TITLES = {
    "read": "Read the number",
    "count": "Count the digits",
    "compare": "Larger of two",
    "locate": "Locate a digit",
    "arithmetic": "Arithmetic (text)",
    "copy": "Copy (text)",
}


def gather(work: DemoRun, stages: dict[str, Any], *, is_quick: bool) -> Results:
    """Results of a finished demo, from the records of its stages."""
    tests = {name: stages[f"test-{name}"] for name in models(work.settings)}
    merged = tests["merged"]
    headline = merged["by_task"]["read3"]
    return Results(
        seed=work.seed,
        is_quick=is_quick,
        commit=commit(),
        headline=Headline(
            title="Unseen three-digit numbers, on one line, read exactly by the merged model",
            score=headline["score"],
            num_items=headline["num_items"],
            wanted=WANTED,
        ),
        stages=tuple(_stage(work, name, stages[name]) for name in stages),
        table=ScoreTable(
            tasks=tuple(
                Task(name=name, title=TASK_TITLES[name], num_items=merged["by_task"][name]["num_items"])
                for name in BENCHMARK_TASKS
            ),
            rows=tuple(
                TableRow(
                    model=name,
                    role="merged" if name == "merged" else "parent",
                    scores=tuple(report["by_task"][task]["score"] for task in BENCHMARK_TASKS),
                )
                for name, report in tests.items()
            ),
        ),
        search=_search(work, stages),
        examples=_examples(work, stages["search-merged"]["chosen"]),
        timing=Timing(
            stages=tuple(
                StageTiming(stage=name, seconds=work.book.seconds[name], tokens_per_s=stages[name].get("tokens_per_s"))
                for name in stages
            )
        ),
        machine=this_machine(),
    )


def this_machine() -> Machine:
    """The machine that the demo runs on."""
    return Machine(
        device="CPU",
        num_cores=machine.num_cores(),
        memory_gib=round(machine.memory_bytes() / 2**30, 1),
        platform=platform.platform(),
        versions=machine.versions(),
        finished_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _stage(work: DemoRun, name: str, record: dict[str, Any]) -> Stage:
    title, does = stage_words(name, work)
    stats = record.get("stats")
    packing = None
    if stats:
        visual = stats["visual_tokens"]
        packing = Packing(
            num_packs=stats["packs"],
            num_samples=stats["samples"],
            efficiency=stats["packing_efficiency"],
            visual_tokens_mean=visual["mean"],
            visual_tokens_max=visual["max"],
            visual_tokens_cv=visual["cv"],
        )
    curve = tuple(
        CurvePoint(step=int(step), loss=loss, learning_rate=rate) for step, loss, rate in record.get("curve", ())
    )
    # Directories inside the demo's own are shown relative to it, the same for every run.
    command = "\n".join(text.replace(f"{work.out}/", "") for text in work.book.commands[name])
    file = work.out / "recipes" / f"{name}.yaml"
    recipe = file.read_text().replace(f"{work.out}/", "") if file.is_file() else ""
    return Stage(name=name, title=title, does=does, command=command, recipe=recipe, curve=curve, packing=packing)


def stage_words(name: str, work: DemoRun) -> tuple[str, str]:
    """Title and short description of a stage."""
    kind, _, rest = name.partition("-")
    if kind == "sft":
        limit = sft_phases(work.settings)[name].max_pixels
        return f"SFT, {rest} tokens", f"trains everything on packs of {rest} tokens, images up to {limit} visual tokens"
    if kind in ("search", "test"):
        split = "validation split over the grid" if kind == "search" else "test split, once"
        return f"{kind.capitalize()} {rest}", f"answers the {split}"
    return {
        "tokenizer": ("Tokenizer", "trains a byte-level BPE on the demo's texts"),
        "data": ("Data", "composes pages from training scans, writes and indexes shards"),
        "benchmarks": ("Benchmarks", "composes validation and test questions from other scans"),
        "backbone-vision": ("Vision backbone", "pre-trains the vision encoder on single digits"),
        "backbone-language": ("Language backbone", "pre-trains the language model on the text-only tasks"),
        "warmup": ("Warm-up", "trains the projector only"),
        "multitask": ("Multitask", "trains everything, one text-only sample in five"),
        "merge": ("Merge", "averages the three SFT models"),
    }[name]


def _search(work: DemoRun, stages: dict[str, Any]) -> ResolutionSearch:
    settings = work.settings
    minimums, maximums = ([blocks * BLOCK for blocks in axis] for axis in (settings.grid_min, settings.grid_max))
    grids = []
    for name in models(settings):
        cells = {(cell["min_pixels"], cell["max_pixels"]): cell["score"] for cell in stages[f"search-{name}"]["cells"]}
        scores = tuple(tuple(cells.get((low, high)) for high in maximums) for low in minimums)
        grids.append(GridScores(model=name, role="merged" if name == "merged" else "parent", scores=scores))
    chosen, test = stages["search-merged"]["chosen"], stages["test-merged"]
    return ResolutionSearch(
        min_pixels=tuple(minimums),
        max_pixels=tuple(maximums),
        models=tuple(grids),
        chosen_min_pixels=chosen["min_pixels"],
        chosen_max_pixels=chosen["max_pixels"],
        validation_score=chosen["score"],
        test_score=sum(test["by_task"][task]["score"] for task in BENCHMARK_TASKS) / len(BENCHMARK_TASKS),
        num_validation_items=settings.validation_items * len(BENCHMARK_TASKS),
    )


def _examples(work: DemoRun, chosen: dict[str, Any]) -> tuple[Example, ...]:
    """The first test items of each task with the cached answers of the merged model."""
    from mindvl_cli.pages.benchmark import CACHE_NAME
    from mindvl_cli.predictor import make_predictor
    from mindvl_merge.evaluation import PredictConfig, load_benchmarks
    from mindvl_merge.evaluation.run import score_prediction

    options = dict(zip(ANSWER_OPTIONS[::2], ANSWER_OPTIONS[1::2], strict=True))
    config = PredictConfig(
        device=options["--device"],
        batch_size=int(options["--batch-size"]),
        max_new_tokens=int(options["--max-new-tokens"]),
    )
    cache = work.out / "scores" / "merged" / CACHE_NAME
    # Exported by the demo.
    predictor = make_predictor(work.model("merged"), config=config, cache=cache, trust_remote_code=True)
    shown = []
    for benchmark in load_benchmarks(work.benchmarks("test")):
        if benchmark.name not in BENCHMARK_TASKS:
            continue
        items = benchmark.items[:EXAMPLES_PER_TASK]
        limits = {"min_pixels": chosen["min_pixels"], "max_pixels": chosen["max_pixels"]}
        for prediction in predictor.predict(predictor.questions(items, **limits)):
            item = prediction.item
            shown.append(
                Example(
                    task=item.task,
                    images=tuple(image for image in item.images if isinstance(image, Path)),
                    question=item.question,
                    answer=prediction.answer,
                    truth=item.answer if item.box is None else f"inside {list(item.box)}",
                    is_right=score_prediction(prediction) == 1.0,
                )
            )
    return tuple(shown)
