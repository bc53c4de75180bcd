# SPDX-License-Identifier: Apache-2.0
"""What a run consumed and trained on, from its records, and the verification against the data order.

`consumed` only reads the records, `verify` also recomputes the data order and compares it. Both stream: memory is one
bit per sample of the epochs in use.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mindvl_data.audit_lines import AuditLine, count_lines
from mindvl_data.config import DataConfig
from mindvl_data.errors import DataError
from mindvl_data.ledger.account import Account, Link, TrainingRecords
from mindvl_data.ledger.chain import chain_of, spans_of
from mindvl_data.ledger.replay import MAX_REPORTED, LogSpan, ReplayJob, ReplayResult, is_raise, plain, replay
from mindvl_data.ledger.usage import EpochUse, UsableSamples
from mindvl_data.order.data_order import DataOrder
from mindvl_data.order.sources import SourceIndex
from mindvl_data.process import end_with_parent
from mindvl_data.shards.files import ShardFiles
from mindvl_data.tokenization import Tokenizer, load_tokenizer
from mindvl_data.tracker import changed_data, check_state, differences, identities, open_state, saved_order

Progress = Callable[[int, int], None]  # (done, total) in steps
_MOST_PROCESSES = 16


def consumed(
    audit_log: Path,
    *,
    state: dict[str, Any] | None = None,
    quarantine_log: Path | None = None,
    training: TrainingRecords | None = None,
) -> dict[str, Any]:
    """Count what a run consumed: steps, samples, tokens by source, failed samples, data changes, times. JSON values.

    A step is logged when its packs were returned. Steps after the newest checkpoint are dropped when the run resumes, so
    `trained_on` and `skipped` count the steps up to the checkpoint, and `after_checkpoint` the others.

    Args:
        state: Ledger state of the newest checkpoint.
        quarantine_log: `quarantine_log` of the configuration.
        training: Records of the trainer; None: no step was skipped.

    Raises:
        DataError: The log cannot be read.
    """
    if state is not None:
        check_state(state)
    links = [Link(audit_log=audit_log, quarantine_log=quarantine_log, training=training or TrainingRecords())]
    account = Account(links, state)
    for span in spans_of(links[0]):
        for line in span.lines():
            account.add(line, 0)
    return account.figures()


def verify(
    config: DataConfig,
    audit_log: Path,
    *,
    global_batch_size: int,
    state: dict[str, Any] | None = None,
    quarantine_log: Path | None = None,
    training: TrainingRecords | None = None,
    parent_log: Path | None = None,
    num_processes: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """`consumed`, and a comparison with the data order of this configuration.

    Checks that steps are consecutive, that each has exactly the samples of the data order, that no sample occurs twice
    in an epoch, that finished epochs contain every usable sample, that the checkpoint's ledger belongs to this log, and
    that skipped samples are recorded. The steps before a branch are read from the parent's log. Steps before a change of
    the data cannot be recomputed: only their order, repeats and totals are checked.

    Args:
        global_batch_size: `global_batch_size` of the loader.
        state: Ledger state of the newest checkpoint.
        training: Records of the trainer; None: no step was skipped.
        parent_log: Audit log of the run from which this run was branched; None: the log named by the branch.
        num_processes: Limit of processes; None: one per core. A log of one part is replayed in this process.

    Returns:
        The figures of `consumed` and `verified`: `steps` compared with the data order, `samples` of these steps,
        `finished_epochs` by source, `num_problems`, and lists of the first `problems` and of `notes`.

    Raises:
        DataError: The log, the index or the tokenizer cannot be read.
    """
    if state is not None:
        check_state(state)
    own = Link(audit_log=audit_log, quarantine_log=quarantine_log, training=training or TrainingRecords())
    links, lost = chain_of(own, parent_log)
    files = ShardFiles(config.store)
    try:
        tokenizer = load_tokenizer(config.tokenizer)
        check = _Check(config, files, tokenizer, global_batch_size, links, state)
        for problem in lost:
            check.problem(problem)
        check.run(num_processes or min(os.cpu_count() or 1, _MOST_PROCESSES), progress)
    finally:
        files.close()
    return check.account.figures() | {"verified": check.result()}


class _Check:
    """Compares the lines of a chain of logs with the data order."""

    def __init__(
        self,
        config: DataConfig,
        files: ShardFiles,
        tokenizer: Tokenizer,
        global_batch_size: int,
        links: Sequence[Link],
        state: dict[str, Any] | None,
    ) -> None:
        self._config, self._global_batch_size, self._links, self._state = config, global_batch_size, links, state
        self._sources = [SourceIndex(source, config, tokenizer, files) for source in config.sources]
        self._largest_sample = DataOrder(config, self._sources, global_batch_size=global_batch_size).largest_sample
        self._identities = identities(config, self._sources, tokenizer, global_batch_size)
        self._saved = None if state is None else saved_order(state)
        self.account = Account(links, state)
        self._use: dict[tuple[str, int], EpochUse] = defaultdict(EpochUse)
        self._whole_from = dict.fromkeys((source.name for source in self._sources), 0)  # first complete epoch
        self._usable: dict[str, UsableSamples] = {}
        self._closed: Counter[str] = Counter()  # checked epochs of a source
        self._finished: Counter[str] = Counter()  # checked epochs without a difference
        self._last_step, self._compared, self._num_samples = 0, 0, 0
        self._ended: dict[str, Any] | None = None  # state of the data order after the last span
        self._is_whole = True  # no step is missing or repeated so far
        self._num_problems = 0
        self._problems: list[str] = []
        self._notes: list[str] = []

    def run(self, num_processes: int, progress: Progress | None) -> None:
        """Read all lines, and replay the parts that can be replayed."""
        spans = [(link, span) for link in range(len(self._links)) for span in spans_of(self._links[link])]
        jobs = self._jobs([span for _, span in spans])
        num_steps = sum(count_lines(link.audit_log)[0] for link in self._links) if progress is not None else 0
        done = 0

        def report(steps: int) -> None:
            nonlocal done
            done += steps
            if progress is not None:
                progress(min(done, num_steps), num_steps)

        with ExitStack() as stack:
            futures: list[Future[ReplayResult] | None] = [None] * len(spans)
            if num_processes > 1 and sum(job is not None for job in jobs) > 1:
                pool = ProcessPoolExecutor(num_processes, get_context("spawn"), initializer=end_with_parent)
                stack.callback(pool.shutdown, wait=True, cancel_futures=True)
                futures = [None if job is None else pool.submit(replay, job) for job in jobs]
            for (link, span), job, future in zip(spans, jobs, futures, strict=True):
                before = self.account.num_steps
                for line in span.lines():
                    self._add(line, link)
                if job is None:
                    report(self.account.num_steps - before)
                    continue
                if future is None:
                    found = replay(job, report)
                else:
                    found = _result_of(future)
                    report(self.account.num_steps - before)
                self._take(job, found)
        self._finish()

    def problem(self, text: str, *, first: bool = False) -> None:
        """Add a problem; beyond MAX_REPORTED it is only counted."""
        self._num_problems += 1
        if first or len(self._problems) < MAX_REPORTED:
            self._problems.insert(0 if first else len(self._problems), text)

    def result(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "steps": self._compared,
            "samples": self._num_samples,
            "finished_epochs": dict(self._finished),
            "num_problems": self._num_problems,
            "problems": self._problems,
            "notes": self._notes,
        }

    def _jobs(self, spans: Sequence[LogSpan]) -> list[ReplayJob | None]:
        """The replay of each span; None: not possible, because its data changed later."""
        heads: list[AuditLine | None] = []
        marks: list[tuple[int, int, AuditLine]] = []  # span, number in it, mark
        for number, span in enumerate(spans):
            head, found = span.marks()
            heads.append(head)
            marks += [(number, place, mark) for place, mark in enumerate(found, 1)]
        names = [source.name for source in self._sources]
        first_span, first_mark = 0, 0
        for number, place, mark in marks:
            if not (mark.kind == "change" and is_raise(mark.change)) and not self._follows(mark):
                first_span, first_mark = number, place
        last_sources = [mark.sources for _, _, mark in marks][-1:]
        if last_sources and last_sources != [names]:
            self.problem(
                f"after step {marks[-1][2].step} the run continued with the sources {' '.join(last_sources[0])}, but "
                f"this configuration has {' '.join(names)}: later steps were not compared"
            )
            return [None] * len(spans)
        jobs: list[ReplayJob | None] = []
        for number, (span, head) in enumerate(zip(spans, heads, strict=True)):
            if number < first_span:
                jobs.append(None)
                continue
            raises = tuple(
                mark.change
                for at, place, mark in marks
                if mark.kind == "change"
                and is_raise(mark.change)
                and (at, place) > (number, 0)
                and (at, place) > (first_span, first_mark)
            )
            order = None if head is None or head.kind == "packs" else head.order
            if order is not None and head is not None and head.sources != names:
                self.problem(f"{head.where}: has the sources {' '.join(head.sources)}, the run has {' '.join(names)}")
                jobs.append(None)
                continue
            jobs.append(
                ReplayJob(
                    config=self._config,
                    global_batch_size=self._global_batch_size,
                    span=span,
                    order=order,
                    first_mark=first_mark if number == first_span else 0,
                    raises=raises,
                    saved=self._saved,
                )
            )
        return jobs

    def _follows(self, mark: AuditLine) -> bool:
        """Whether a branch begins where the log of its parent ends, so that nothing before it is lost."""
        return mark.kind == "branch" and mark.branch == 0 and len(self._links) > 1

    def _add(self, line: AuditLine, link: int) -> None:
        if line.kind == "part":
            if line.step != self._last_step:
                self.problem(
                    f"{line.where}: the part follows step {line.step}, the part before it ends at {self._last_step}"
                )
            return
        if line.kind != "packs":
            self._pass_mark(line)
            self.account.add(line, link)
            return
        if line.step != self._last_step + 1:
            what = "is missing" if line.step > self._last_step + 1 else f"follows {self._last_step}"
            at = self._last_step + 1 if line.step > self._last_step + 1 else line.step
            self.problem(f"step {at} {what}, the log continues with step {line.step}")
            self._is_whole = False
        self._last_step = line.step
        for pack in line.packs:
            for source, epoch, shard, number in pack:
                if not self._use[source, epoch].add(shard, number):
                    self.problem(
                        f"step {line.step}: {shard} sample {number} of {source} was used before in epoch {epoch}"
                    )
        self.account.add(line, link)
        if self._saved is not None and line.step == self._saved["step"]:
            self._compare_totals(self._saved, "the newest checkpoint")

    def _pass_mark(self, line: AuditLine) -> None:
        if line.kind == "branch":
            if self._last_step != line.step:
                self.problem(f"{line.where}: steps {self._last_step + 1} to {line.step} are missing")
                self._is_whole = False
            else:
                self._notes.append(f"steps 1 to {line.step} were read from the log of the parent of this run")
        else:
            what = "max_epochs" if is_raise(line.change) else "data"
            later = "" if is_raise(line.change) else ": the steps before were checked for order and repeats only"
            self._notes.append(
                f"{what} of {', '.join(sorted(line.change['sources']))} changed after step {line.step}, accepted by "
                f"{line.change['who']}{later}"
            )
            for name, epoch in list(self._use):
                if name in line.change["sources"] and not is_raise(line.change):
                    del self._use[name, epoch]  # its shards may have other names now
        if self._last_step == line.step:
            self._compare_totals(line.order, line.where)
        if not is_raise(line.change) if line.kind == "change" else self._last_step != line.step:
            # Limits derived from the data may have changed too, so the current epoch of no source can be complete.
            self._whole_from = {
                name: epoch + (position > 0)
                for name, (epoch, position) in zip(line.sources, line.order["drawn_at"], strict=True)
            }
        self._last_step = line.step

    def _compare_totals(self, order: Mapping[str, Any], where: str) -> None:
        """Compare the samples and tokens of the lines so far with the totals of the state."""
        if not self._is_whole:
            return
        samples, tokens = self.account.totals()
        expected = order["totals"].get("samples", 0), sum(order["tokens_by_source"].values())
        if (samples, tokens) != expected:
            self.problem(
                f"{where}: {expected[0]} samples of {expected[1]} tokens are counted up to step {self._last_step}, the log "
                f"holds {samples} of {tokens}"
            )

    def _take(self, job: ReplayJob, found: ReplayResult) -> None:
        """Add the result of a span, which must begin where the span before it ended."""
        self._compared += found.num_steps
        self._num_samples += found.num_samples
        self._num_problems += found.num_problems - len(found.problems)
        for text in found.problems:
            self.problem(text)
        before, self._ended = self._ended, found.order
        if before is not None and job.order is not None and _comparable(before) != _comparable(plain(job.order)):
            self.problem(
                f"{job.span.file}:1: begins at another position of the data order than the end of the log before it"
            )
        if found.order is not None:
            self._close_epochs(found.order)

    def _close_epochs(self, state: dict[str, Any]) -> None:
        """Check the epochs that are complete: drawn to the end, with no waiting samples."""
        waiting = {(self._sources[source].name, epoch) for source, epoch, *_ in state["buffer"]}
        for source, (epoch, _) in zip(self._sources, state["drawn_at"], strict=True):
            name = source.name
            while self._closed[name] < epoch and (name, self._closed[name]) not in waiting:
                use = self._use.pop((name, self._closed[name]), EpochUse())
                if self._closed[name] >= self._whole_from.get(name, 0):
                    self._close(source, self._closed[name], use)
                self._closed[name] += 1

    def _close(self, source: SourceIndex, epoch: int, use: EpochUse) -> None:
        if source.name not in self._usable:
            self._usable[source.name] = UsableSamples(source, self._config.packing.seq_length, self._largest_sample)
        difference = use.compare(self._usable[source.name])
        if difference is None:
            self._finished[source.name] += 1
        else:
            self.problem(f"epoch {epoch} of {source.name}: {difference}")

    def _finish(self) -> None:
        """After the last line: compare the checkpoint and the records with the log."""
        for problem in self.account.disagreements():
            self.problem(problem)
        if self._state is None:
            return
        saved_step = self._state["order"]["step"]
        if saved_step > self._last_step:
            self.problem(f"steps {self._last_step + 1} to {saved_step} of the checkpoint are not in the log")
        elif saved_step < self._last_step:
            self._notes.append(
                f"the log is {self._last_step - saved_step} steps ahead of the newest checkpoint: they are dropped "
                "and repeated when the run resumes"
            )
        known = self._state["changes"]
        for change in self.account.changes:
            if change["step"] < saved_step and change not in known:
                self.problem(f"a change of data after step {change['step']} is in the log, but not in the checkpoint")
        for change in known:
            if change not in self.account.changes:
                self.problem(f"a change of data after step {change['step']} is in the checkpoint, but not in the log")
        different = differences(self._state["identities"], self._identities)
        accepted = {n for change in self.account.changes if change not in known for n in change["sources"]}
        if changed_data(different) and changed_data(different).keys() <= accepted:
            self._notes.append("the newest checkpoint was written before the data changed")
            return
        try:
            open_state(self._state, self._identities, sources=[source.name for source in self._sources])
        except DataError as error:
            self.problem(str(error), first=True)  # it explains the other problems


def _comparable(order: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in order.items() if name != "derived"}  # unknown after changed data


def _result_of(future: Future[ReplayResult]) -> ReplayResult:
    try:
        return future.result()
    except BrokenExecutor as error:
        raise DataError(
            "data ledger --verify: a worker process died, possibly because of too little memory. "
            "Try again with fewer --processes."
        ) from error
