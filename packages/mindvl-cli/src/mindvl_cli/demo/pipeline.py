# SPDX-License-Identifier: Apache-2.0
"""The stages of the demo from scans to report, run through the commands of mindvl.

Comes after settings, content and recipes; commands/demo.py calls it. Each function is one stage; `run_demo` is their
order, which is the paper's: backbones, warm-up, multitask, SFT at three lengths, average, search, test.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindvl_cli.demo.digits import Split
from mindvl_cli.demo.recipe import write_recipe
from mindvl_cli.demo.settings import DemoSettings, PhaseSettings
from mindvl_cli.demo.stages import StageBook
from mindvl_cli.demo.tasks import BENCHMARK_TASKS, Task, sample_texts, write_benchmark, write_source
from mindvl_cli.demo.tokenizer import train_tokenizer
from mindvl_cli.progress import progress

if TYPE_CHECKING:
    from mindvl_train.config import Part, Phase

ANSWER_OPTIONS = ("--device", "cpu", "--batch-size", "64", "--max-new-tokens", "20")
TRUSTED = "--trust-remote-code"  # the demo itself exported the models, with the code of mindvl_model


@dataclass(frozen=True)
class DemoRun:
    """Directories of a demo, its settings and its records."""

    out: Path
    settings: DemoSettings
    seed: int
    book: StageBook

    @property
    def tokenizer(self) -> Path:
        return self.out / "tokenizer"

    @property
    def shards(self) -> Path:
        return self.out / "shards"

    def run(self, stage: str) -> Path:
        """Directory of a training run."""
        return self.out / "runs" / stage

    def model(self, stage: str) -> Path:
        """Directory of an exported model."""
        return self.out / "models" / stage

    def benchmarks(self, split: str) -> Path:
        """Directory of a split's benchmarks."""
        return self.out / "benchmarks" / split


def run_demo(work: DemoRun) -> dict[str, Any]:
    """Run every unfinished stage in order; returns the record of each stage."""
    settings, stage = work.settings, work.book.run
    results = run_start(work, partial(make_benchmarks, work))
    start = {"checkpoint": work.run("multitask")}
    for name, phase in sft_phases(settings).items():
        results[name] = stage(name, partial(train, work, name, phase, start, phase_name="sft", export=True))
    results["merge"] = stage("merge", partial(merge, work, list(sft_phases(settings)), "merged"))
    for name in models(settings):
        results[f"search-{name}"] = stage(f"search-{name}", partial(search, work, name, "validation"))
    for name in models(settings):
        chosen = results[f"search-{name}"]["chosen"]
        results[f"test-{name}"] = stage(f"test-{name}", partial(test, work, name, chosen, "test"))
    return results


def run_start(work: DemoRun, benchmarks: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run the stages before SFT: data, `benchmarks`, backbones, warm-up and multitask."""
    settings, stage = work.settings, work.book.run
    results: dict[str, Any] = {
        "tokenizer": stage("tokenizer", partial(make_tokenizer, work)),
        "data": stage("data", partial(make_data, work)),
        "benchmarks": stage("benchmarks", benchmarks),
        "backbone-vision": stage("backbone-vision", partial(make_vision_backbone, work)),
        "backbone-language": stage("backbone-language", partial(make_language_backbone, work)),
    }
    backbones = {"vision": work.model("backbone-vision"), "language": work.model("backbone-language")}
    training = {
        "warmup": partial(train, work, "warmup", settings.warmup, backbones, phase_name="warmup"),
        "multitask": partial(
            train, work, "multitask", settings.multitask, {"checkpoint": work.run("warmup")}, phase_name="multitask"
        ),
    }
    return results | {name: stage(name, action) for name, action in training.items()}


def sft_phases(settings: DemoSettings) -> dict[str, PhaseSettings]:
    """The SFT stages by name; the name has the sequence length."""
    return {f"sft-{phase.seq_length}": phase for phase in settings.sft}


def models(settings: DemoSettings) -> list[str]:
    """Models that are searched and tested: each SFT run and their average."""
    return [*sft_phases(settings), "merged"]


def make_tokenizer(work: DemoRun) -> dict[str, Any]:
    """Train the tokenizer on the demo's own texts."""
    shutil.rmtree(work.tokenizer, ignore_errors=True)
    train_tokenizer(sample_texts(num_samples=work.settings.tokenizer_samples, seed=work.seed), work.tokenizer)
    return {}


def make_data(work: DemoRun) -> dict[str, Any]:
    """Compose the pages of every source, write them as LLaVA data, then as shards with an index."""
    counts = {}
    for number, (name, source) in enumerate(work.settings.sources.items()):
        raw, shards = work.out / "sources" / name, work.shards / name
        shutil.rmtree(raw, ignore_errors=True)
        shutil.rmtree(shards, ignore_errors=True)
        with progress(f"compose {name}", total=source.num_samples, unit="samples") as advance:
            data = write_source(
                raw,
                shares=source.shares,
                num_samples=source.num_samples,
                seed=work.seed * 1000 + number,
                progress=advance,
            )
        work.book.command("data", "write", data, "--format", "llava", "--out", shards)
        counts[name] = work.book.command("data", "index", shards, "--tokenizer", work.tokenizer)["directories"][0][
            "samples"
        ]
    return counts


def make_benchmarks(work: DemoRun) -> dict[str, Any]:
    """Write validation and test questions, with scans and numbers that no training image contains."""
    settings = work.settings
    counts: dict[Split, dict[Task, int]] = {
        "validation": dict.fromkeys(BENCHMARK_TASKS, settings.validation_items),
        "test": {**dict.fromkeys(BENCHMARK_TASKS, settings.test_items), "read3": settings.headline_items},
    }
    for number, (split, tasks) in enumerate(counts.items(), start=500):
        directory = work.benchmarks(split)
        shutil.rmtree(directory, ignore_errors=True)
        for task, count in tasks.items():
            write_benchmark(directory, task=task, split=split, num_samples=count, seed=work.seed * 1000 + number)
    return {}


def make_vision_backbone(work: DemoRun) -> dict[str, Any]:
    """Pre-train the vision encoder on single digits."""
    from mindvl_cli.demo.backbones import pretrain_vision
    from mindvl_data import load_tokenizer
    from mindvl_model import MindVLConfig, TokenConfig, for_tokenizer

    settings, out = work.settings, work.model("backbone-vision")
    shutil.rmtree(out, ignore_errors=True)
    tokenizer = load_tokenizer(work.tokenizer)
    unset = TokenConfig(image=0, vision_start=0, vision_end=0, end_of_turn=0, pad=0)
    config = for_tokenizer(
        MindVLConfig(vision=settings.vision, language=settings.language.decoder(), tokens=unset),
        tokenizer.special_ids,
        tokenizer.vocab_size,
    )
    with progress("train vision", total=settings.vision_backbone.steps, unit="steps") as advance:
        return pretrain_vision(
            out,
            config,
            settings.vision_backbone,
            tokenizer=work.tokenizer,
            seed=work.seed,
            on_step=lambda step, loss: advance(1, note=f"loss {loss:.3f}"),
        )


def make_language_backbone(work: DemoRun) -> dict[str, Any]:
    """Pre-train the language model on the text-only tasks."""
    phase = work.settings.language_backbone
    return train(work, "backbone-language", phase, {}, phase_name="multitask", trainable=("language",), export=True)


def train(
    work: DemoRun,
    name: str,
    phase: PhaseSettings,
    init: dict[str, Path],
    *,
    phase_name: "Phase",
    trainable: "tuple[Part, ...] | None" = None,
    export: bool = False,
) -> dict[str, Any]:
    """Write the recipe of a stage, train it, and export it if asked; returns curve and packing."""
    from mindvl_train.metrics.sinks import read_metrics

    recipe = write_recipe(
        work.out / "recipes" / f"{name}.yaml",
        work.settings,
        phase,
        phase=phase_name,
        out=work.run(name),
        shards=work.shards,
        tokenizer=work.tokenizer,
        seed=work.seed,
        init=init,
        trainable=trainable,
    )
    work.book.command("train", recipe, *(("--nproc", str(phase.num_processes)) if phase.num_processes > 1 else ()))
    stats = work.book.command("data", "stats", recipe, "--packs", str(min(256, phase.steps * phase.global_batch_size)))
    if export:
        shutil.rmtree(work.model(name), ignore_errors=True)
        work.book.command("convert", work.run(name), work.model(name))
    lines = read_metrics(work.run(name) / "metrics.jsonl")
    return {
        "curve": [[line["step"], line["loss"], line["learning_rate"]] for line in lines],
        "tokens_per_s": sorted(line["tokens_per_s"] for line in lines)[len(lines) // 2],
        "stats": stats,
    }


def merge(work: DemoRun, parents: Sequence[str], name: str) -> dict[str, Any]:
    """Average exported models."""
    out = work.model(name)
    shutil.rmtree(out, ignore_errors=True)
    return work.book.command("merge", *map(work.model, parents), "--out", out)


def search(work: DemoRun, name: str, split: str) -> dict[str, Any]:
    """Score a model on a split over the grid; returns the cells and the chosen one."""
    settings = work.settings
    minimums, maximums = (",".join(map(str, axis)) for axis in (settings.grid_min, settings.grid_max))
    return work.book.command(
        *("search-resolution", work.model(name), "--benchmark", work.benchmarks(split)),
        *("--grid", f"{minimums}x{maximums}", "--out", work.out / "search" / name),
        *(() if name != "merged" else ("--apply",)),
        *ANSWER_OPTIONS,
        TRUSTED,
    )


def test(work: DemoRun, name: str, chosen: dict[str, Any], split: str) -> dict[str, Any]:
    """Score a model once on a split, with the image limits chosen on the validation split."""
    return work.book.command(
        *("eval", work.model(name), "--benchmark", work.benchmarks(split)),
        *("--min-pixels", str(chosen["min_pixels"]), "--max-pixels", str(chosen["max_pixels"])),
        *("--out", work.out / "scores" / name),
        *ANSWER_OPTIONS,
        TRUSTED,
    )
