# SPDX-License-Identifier: Apache-2.0
"""Rehearse every training stage of the published recipes on all intended numbers of devices; `nox -s rehearse`.

Each job is one `mindvl rehearse` with one rank of each class of equal ranks, or with `--tightest` the rank with the highest
estimate alone; jobs with few packed sequences for each rank come first. Results are kept with their commit in the
directory of `--out`, so that a stopped session continues with the next job. Arguments are words in names of jobs, such as
"mindvl-8b sft-2048 on 128"; by default all are rehearsed. The exit code is 1 if a job fails, does not fit, would hang or
lacks operators, or if the highest peak of a pipeline stage differs by more than 3 % from the estimate of the layout
search. `--write` writes all results to the table of docs/design/evidence/rehearsal.md.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindvl_cli.load import load_config
from mindvl_train.config import RunConfig
from mindvl_train.devices import find_device
from mindvl_train.layout_search import Machine, evaluate
from mindvl_train.layout_search.request import request_of
from mindvl_train.phases import PipelineConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "evidence" / "rehearsal.md"
DEVICE = "910b2"
# Pipeline files with all training stages of a model, and the numbers of devices that its recipes name.
PIPELINES = {"mindvl-8b/pipeline-4phase.yaml": (16, 32, 64, 128), "mindvl-671b-a37b/pipeline.yaml": (512, 1024)}
# Recipes of one training stage, and the numbers of devices that they name.
RECIPES = {"qwen3-vl-4b/sft.yaml": (64,), "qwen3-vl-30b-a3b/sft.yaml": (64,)}
# These jobs fit with the moments in host memory, as the recipes say.
OFFLOADED = {("mindvl-671b-a37b multitask", 512), ("mindvl-671b-a37b sft-8192", 512)}
MAX_DIFFERENCE = 0.03  # between rehearsed and estimated peak
HEADER = "| training stage | devices | commit | rank | peak | estimate | difference | messages | host waits | missing | seconds |"


@dataclass(frozen=True)
class Job:
    """One training stage on a number of devices."""

    stage: str  # such as "mindvl-8b sft-2048"
    num_devices: int
    arguments: tuple[str, ...]  # recipe and overrides

    @property
    def name(self) -> str:
        """What the words of the command line select."""
        return f"{self.stage} on {self.num_devices}"

    def directory(self, *, tightest: bool) -> str:
        """Where its results are kept."""
        return self.name.replace(" ", "-") + "-tightest" * tightest

    @property
    def config(self) -> RunConfig:
        """The recipe."""
        recipe, *overrides = self.arguments
        return load_config(ROOT / recipe, RunConfig, overrides)

    @property
    def num_packs(self) -> int:
        """Packed sequences of a rank in a step, for which a rehearsal takes its time."""
        return self.config.global_batch_size * self.config.parallel.model_parallel_size // self.num_devices

    @property
    def tightest_rank(self) -> int:
        """First rank of the pipeline stage with the highest estimate."""
        config, device = self.config, find_device(DEVICE)
        assert device is not None
        task = request_of(config, Machine(device=device, num_devices=self.num_devices)).task()
        fullest = evaluate(task, config.parallel, config.recompute, offload=config.optimizer.offload).fullest
        return fullest * self.num_devices // config.parallel.pp_size


def main() -> int:
    """Run the session; returns the exit code."""
    parser = argparse.ArgumentParser(description="Rehearse the published recipes.")
    parser.add_argument("words", nargs="*", help="Words in names of jobs; default: all jobs.")
    parser.add_argument("--out", type=Path, required=True, help="Directory for results.")
    parser.add_argument("--tightest", action="store_true", help="Rehearse one rank of each job.")
    parser.add_argument("--write", action="store_true", help="Write the table of docs/design/evidence/rehearsal.md.")
    options = parser.parse_args()
    every = jobs()
    chosen = [job for job in every if not options.words or any(word in job.name for word in options.words)]
    if not chosen:
        parser.error(f"no job has these words in its name. Jobs: {', '.join(job.name for job in every)}.")
    commit = _commit()
    failed = 0
    for job in sorted(chosen, key=lambda job: job.num_packs):
        directory = options.out / job.directory(tightest=options.tightest)
        document = result(directory)
        if document is None or document["commit"] != commit:
            document = rehearse(job, directory, commit, job.tightest_rank if options.tightest else None)
        found = problems(document)
        failed += bool(found)
        for row in [] if document is None else rows(job, document):
            print(row, flush=True)
        for problem in found:
            print(f"{job.name}: {problem}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} rehearsals succeeded at commit {commit}")
    if options.write:
        PAGE.write_text(with_table(PAGE.read_text(), every, options.out))
    return 1 if failed else 0


def jobs() -> list[Job]:
    """All training stages on all numbers of devices."""
    found = []
    for pipeline, counts in PIPELINES.items():
        path = Path("recipes") / pipeline
        for stage in load_config(ROOT / path, PipelineConfig).stages:
            arguments = (str(path.parent / stage.recipe), *stage.overrides)
            name = f"{path.parent.name} {stage.name}"
            for count in counts:
                more = ("optimizer.offload=true",) if (name, count) in OFFLOADED else ()
                found.append(Job(name, count, (*arguments, *more)))
    for recipe, numbers in RECIPES.items():
        path = Path("recipes") / recipe
        found += [Job(f"{path.parent.name} {path.stem}", count, (str(path),)) for count in numbers]
    return found


def rehearse(job: Job, directory: Path, commit: str, rank: int | None) -> dict[str, Any] | None:
    """Run `mindvl rehearse`, of one rank or of all classes; its document, or None if it failed, as stderr explains."""
    shutil.rmtree(directory, ignore_errors=True)
    command = ("mindvl", "rehearse", *job.arguments, "--device", DEVICE, "--devices", str(job.num_devices))
    command = command if rank is None else (*command, "--ranks", str(rank))
    subprocess.run([*command, "--out", str(directory)], cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    if (directory / "rehearsal.json").exists():
        (directory / "commit").write_text(commit)
    return result(directory)


def result(directory: Path) -> dict[str, Any] | None:
    """The document of a rehearsal that has ended."""
    if not (directory / "commit").exists():
        return None
    return json.loads((directory / "rehearsal.json").read_text()) | {"commit": (directory / "commit").read_text()}


def problems(document: dict[str, Any] | None) -> list[str]:
    """What is wrong with a rehearsal, one sentence each."""
    if document is None:
        return ["the rehearsal failed; its message is above."]
    highest: dict[int, dict[str, Any]] = {}  # by stage: the estimate is that of its rank with most images
    for each in sorted(document["ranks"], key=lambda figures: figures["peak_bytes"]):
        highest[each["coordinates"]["pp_rank"]] = each
    far = [each for each in highest.values() if abs(_difference(each)) > MAX_DIFFERENCE]
    return [
        *document["reasons"],
        *(
            f"rank {each['rank']} peaks at {each['peak_bytes'] / 1e9:.2f} GB, but the layout search estimates "
            f"{each['estimated_bytes'] / 1e9:.2f} GB ({_difference(each):+.1%}). Correct its formulas."
            for each in far
        ),
    ]


def rows(job: Job, document: dict[str, Any]) -> Iterator[str]:
    """Rows of the table, one for each rehearsed rank."""
    for index, each in enumerate(document["ranks"]):
        cells = (
            f"{job.stage} | {job.num_devices:,} | {document['commit']}" if index == 0 else " | | ",
            f"{each['rank']} ({each['content']})",
            f"{each['peak_bytes'] / 1e9:.2f} GB",
            f"{each['estimated_bytes'] / 1e9:.2f} GB",
            f"{100 * _difference(each):+.2f} %",
            f"{sum(messages['count'] for messages in each['messages']):,}",
            f"{sum(wait['count'] for wait in each['waits']):,}",
            ", ".join(each["missing"]) or "none",
            f"{each['wall_s']:.0f}",
        )
        yield f"| {' | '.join(cells)} |"


def with_table(page: str, every: Sequence[Job], out: Path) -> str:
    """The page with all results; jobs without a result keep the rows of the page, or are marked if it has none."""
    lines = [HEADER, "|" + "---|" * (HEADER.count("|") - 1)]
    for job in every:
        found = (result(out / job.directory(tightest=alone)) for alone in (False, True))
        document = next((each for each in found if each is not None), None)
        start = f"| {job.stage} | {job.num_devices:,} |"
        if document is not None:
            lines += rows(job, document)
        elif kept := re.search(rf"^{re.escape(start)}.*\n(\|  \|.*\n)*", page, flags=re.MULTILINE):
            lines += kept[0].splitlines()
        else:
            lines.append(f"{start} not rehearsed |" + " |" * 8)
    table = "\n".join(lines) + "\n"
    new, count = re.subn(rf"^{re.escape(HEADER)}\n(\|.*\n)*", lambda _: table, page, flags=re.MULTILINE)
    assert count == 1, f"{PAGE} has no table of rehearsals"
    return new


def _difference(figures: dict[str, Any]) -> float:
    """Rehearsed peak of a rank relative to the estimate."""
    return float(figures["peak_bytes"] / figures["estimated_bytes"] - 1)


def _commit() -> str:
    """The last commit that changed packages or recipes, and whether they are changed since then."""
    paths = ("--", "packages", "recipes")
    last, changed = (
        subprocess.run(("git", *words, *paths), cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for words in (("log", "-1", "--abbrev=7", "--format=%h"), ("status", "--porcelain"))
    )
    return f"{last}-dirty" if changed else last


if __name__ == "__main__":
    sys.exit(main())
