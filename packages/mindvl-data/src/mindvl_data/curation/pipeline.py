# SPDX-License-Identifier: Apache-2.0
"""Run a curation pipeline: inputs -> parts -> segments of steps -> indexed shards.

The public entry point of mindvl_data.curation. A killed run continues with the parts that are not complete, with any
engine and any number of workers; the output depends on the inputs, the configuration and the seed only.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from mindvl_data.curation.checks import (
    check_disk,
    check_libraries,
    check_steps,
    check_work,
    finished_run,
    prepare_steps,
)
from mindvl_data.curation.config import CurationConfig
from mindvl_data.curation.engine.decisions import decide
from mindvl_data.curation.engine.part_files import summary_path
from mindvl_data.curation.engine.parts import Part, sample_parts, split_inputs
from mindvl_data.curation.engine.ray_data import RayEngine
from mindvl_data.curation.engine.supervision import WorkerPool
from mindvl_data.curation.engine.tally import Tally
from mindvl_data.curation.engine.tasks import Segment, Task
from mindvl_data.curation.output import (
    MANIFEST_NAME,
    SHARDS_NAME,
    index_shards,
    manifest,
    read_summaries,
    write_lists,
    write_manifest,
    write_shards_of_parts,
)
from mindvl_data.curation.segments import cut_segments
from mindvl_data.curation.step import Context
from mindvl_data.errors import DataError
from mindvl_data.shards.claim import CLAIM_NAME, claimed

Engine = Literal["local", "ray"]
ENGINES: tuple[Engine, ...] = ("local", "ray")

WORK_NAME, CACHE_NAME = "work", "cache"

# (what is done, done, total, note), for example ("steps 1 to 4", 2.5, 10, "25,000 records"); in parts, shards or files
Progress = Callable[[str, float, float, str], None]
WritePage = Callable[[Tally, dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Curated:
    """The result of a run.

    Attributes:
        out: Directory with `shards`, `curation.json`, `dropped.jsonl` and `quarantine.jsonl`.
        manifest: Content of curation.json.
        was_finished: The run had been finished before; nothing was done.
    """

    out: Path
    manifest: dict[str, Any]
    was_finished: bool = False


def curate(
    config: CurationConfig,
    *,
    engine: Engine = "local",
    workers: int = 1,
    sample: int | None = None,
    progress: Progress = lambda what, done, total, note: None,
    write_page: WritePage = lambda tally, content: None,
) -> Curated:
    """Run a pipeline, or continue it.

    Args:
        config: Inputs, steps and output.
        engine: `local`, processes of this machine; `ray`, Ray Data.
        workers: Number of worker processes.
        sample: Number of records to choose at random from all inputs; written to `OUT-sample`, which is replaced.
        progress: Called during the work.
        write_page: Called with the tally and the manifest before the run is marked as finished.

    Raises:
        DataError: The configuration does not work with the inputs, the libraries or the directory.
    """
    check_steps(config)
    check_libraries(config)
    all_parts, identities = split_inputs(config.inputs)
    out = output_directory(config, sample)
    parts = all_parts if sample is None else sample_parts(all_parts, sample, config.seed)
    work, cache, answers = out / WORK_NAME, out / CACHE_NAME, config.out / CACHE_NAME
    segments, digest = cut_segments(config, work, parts, identities, version("mindvl-data"))
    check_work(work)
    if sample is not None and (out / MANIFEST_NAME).is_file() | work.is_dir():
        if work.is_dir():
            with claimed(work):  # refuses while another process writes this sample
                pass
        shutil.rmtree(out)
    if finished_run(out, digest):
        return _finished(out)
    for directory in (work, cache, answers):
        directory.mkdir(parents=True, exist_ok=True)
    known = sum(part.records for part in all_parts)
    check_disk(out, identities, 1.0 if sample is None else min(1.0, sample / max(sample, known)))
    context = Context(seed=config.seed, cache=cache, answers=answers)
    prepare_steps(config, context)
    run = _Run(config, segments, parts, work, context, progress)
    with claimed(work):
        if finished_run(out, digest):  # by a process that held the directory until now
            return _finished(out)
        run.forget_others()
        with _engine(engine, workers, config, work) as pool:
            run.process(pool)
        tally, summaries = read_summaries(segments, parts, len(config.steps))
        _write(config, run, summaries, out, workers)
        content = manifest(
            config, identities, parts, [one["content"] for one in _first(segments, parts)], tally,
            digest=digest, sample=sample,
        )  # fmt: skip
        write_page(tally, content)
        write_manifest(out, content)
        _clear(work)
    with suppress(OSError):  # not empty if another process has claimed it by now
        work.rmdir()
    return Curated(out=out, manifest=content)


def output_directory(config: CurationConfig, sample: int | None) -> Path:
    """Directory of the result: `out`, or beside it with the ending `-sample`."""
    if sample is None:
        return config.out
    out = config.out.resolve() if config.out.name in ("", "..") else config.out
    return out.with_name(f"{out.name}-sample")


def _clear(work: Path) -> None:
    """Remove all temporary files but the lock: some network file systems keep a deleted file while it is open."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != CLAIM_NAME:
            path.unlink()


def _finished(out: Path) -> Curated:
    return Curated(out=out, manifest=json.loads((out / MANIFEST_NAME).read_bytes()), was_finished=True)


class _Run:
    """The segments of a run and the state of their parts."""

    def __init__(
        self, config: CurationConfig, segments: Sequence[Segment], parts: Sequence[Part], work: Path, context: Context,
        progress: Progress,
    ) -> None:  # fmt: skip
        self.config = config
        self.segments = segments
        self.parts = parts
        self.progress = progress
        self._work = work
        self._context = context

    def forget_others(self) -> None:
        """Remove files of segments of another configuration, and those of interrupted writes."""
        names = {path.name for one in self.segments for path in (one.directory, one.decisions) if path is not None}
        for path in self._work.iterdir():
            if path.is_dir() and path.name not in names:
                shutil.rmtree(path)
        for segment in self.segments:
            segment.directory.mkdir(exist_ok=True)
            for left in segment.directory.glob(".*.partial"):
                left.unlink()

    def process(self, pool: "WorkerPool | RayEngine") -> None:
        """Run every segment, and decide the set steps between them."""
        wanted: frozenset[str] = frozenset()
        for segment in self.segments:
            self._process_segment(segment, pool, wanted)
            if segment.signed is None:
                continue
            index, name, parameters = segment.signed
            following = self.segments[segment.index + 1]
            assert following.decisions is not None
            self.progress(f"decide {name}", 0, 1, "")
            numbers = [part.number for part in self.parts]
            step = self.config.steps[index].definition
            wanted = decide(step, parameters, self._context, segment.directory, numbers, following.decisions)
            self.progress(f"decide {name}", 1, 1, "")

    def _process_segment(self, segment: Segment, pool: "WorkerPool | RayEngine", wanted: frozenset[str]) -> None:
        left = [part for part in self.parts if not summary_path(segment.directory, part.number).is_file()]
        first, last = self._shown_steps(segment)
        what = f"steps {first} to {last} of {len(self.config.steps)}"
        done, total = float(len(self.parts) - len(left)), float(len(self.parts))
        records = {part.number: 0 for part in left}
        sizes = {part.number: part.records for part in left}
        self.progress(what, done, total, "")

        def read(part: int, count: int) -> None:
            before = _share(records[part], sizes[part])
            records[part] += count
            running[part] = _share(records[part], sizes[part])
            nonlocal done
            done += running[part] - before
            self.progress(what, done, total, f"{sum(records.values()):,} records")

        running: dict[int, float] = {}
        tasks = (self._task(segment, part, wanted) for part in left)
        for number in pool.run(tasks, read):
            done += 1 - running.get(number, 0.0)
            self.progress(what, done, total, f"{sum(records.values()):,} records")

    def _task(self, segment: Segment, part: Part, wanted: frozenset[str]) -> Task:
        return Task(
            segment=segment, part=part, input=self.config.inputs[part.input], seed=self.config.seed,
            cache=self._context.cache, answers=self._context.answers, limits=self.config.limits, name=self.config.name,
            wanted=wanted, list_dropped=self.config.output.list_dropped, number_of_steps=len(self.config.steps),
        )  # fmt: skip

    def _shown_steps(self, segment: Segment) -> tuple[int, int]:
        """Numbers of the segment's first and last step, from 1."""
        numbers = [index + 1 for index, _, _ in segment.steps]
        numbers += [segment.applied[0] + 1] if segment.applied else []
        numbers += [segment.signed[0] + 1] if segment.signed else []
        return (min(numbers), max(numbers)) if numbers else (0, 0)


def _share(records: int, expected: int) -> float:
    """Share of a part that is done; below 1 until the part is complete."""
    return min(0.99, records / expected) if expected else 0.0


def _engine(
    engine: Engine, workers: int, config: CurationConfig, work: Path
) -> AbstractContextManager["WorkerPool | RayEngine"]:
    log = work / "workers.log"
    if engine == "local":
        return WorkerPool(workers, config.limits, log)
    if engine != "ray":
        raise DataError(f"--engine {engine}: the engine does not exist. Use one of {', '.join(ENGINES)}.")
    paths = [work, *(Path(one.path) for one in config.inputs if os.path.exists(one.path))]
    return RayEngine(workers, log, paths)


def _first(segments: Sequence[Segment], parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Summaries of the first segment, which read the inputs."""
    return [json.loads(summary_path(segments[0].directory, part.number).read_bytes()) for part in parts]


def _write(config: CurationConfig, run: _Run, summaries: Sequence[Tally], out: Path, workers: int) -> None:
    """Write shards and lists."""
    written = [summary["written"] for summary in summaries]
    if sum(written):
        write_shards_of_parts(
            out / SHARDS_NAME, run.segments[-1], run.parts, written, config.output.samples_per_shard,
            lambda done, total: run.progress("write shards", done, total, ""),
        )  # fmt: skip
        run.progress("index shards", 0, 1, "")
        index_shards(out / SHARDS_NAME, workers)
        run.progress("index shards", 1, 1, "")
    write_lists(out, run.segments, run.parts)
