# SPDX-License-Identifier: Apache-2.0
"""What a run consumed, from its audit log; and the proof that it is what the plan says.

Comes after everything else of the package: `consumed` only reads the log, `verify` plans the run again beside it.
Both stream: memory is one bit for every sample, and one for every sample of the epochs in use.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindvl_data.audit_log import AuditLine, count_lines, logged_step, read_log
from mindvl_data.config import DataConfig
from mindvl_data.errors import DataError
from mindvl_data.plan.planner import PlannedStep, Planner
from mindvl_data.plan.sources import SourceIndex
from mindvl_data.quarantine import read_quarantine
from mindvl_data.shards.files import ShardFiles
from mindvl_data.tokenization import load_tokenizer
from mindvl_data.tracker import Change, changed_data, differences, identities, open_state, saved_plan
from mindvl_data.usage import EpochUse, UsableSamples

Progress = Callable[[int, int], None]  # (done, total) in steps

_PROBLEMS_NAMED = 20  # the others are only counted


def consumed(
    audit_log: Path, *, state: dict[str, Any] | None = None, quarantine_log: Path | None = None
) -> dict[str, Any]:
    """What a run consumed: steps, samples, tokens by source, bad samples, data changes, when. JSON values.

    A step is in the log once its rows were handed out; what is logged after the newest checkpoint was trained on only
    if the run still goes on, and is dropped when it is resumed.

    Args:
        state: The ledger state of the newest checkpoint.
        quarantine_log: As in the configuration.

    Raises:
        DataError: The log cannot be read.
    """
    tally = _Tally()
    for line in read_log(audit_log):
        tally.add(line)
    return tally.figures(state, quarantine_log)


def verify(
    config: DataConfig,
    audit_log: Path,
    *,
    packs_per_step: int,
    state: dict[str, Any] | None = None,
    quarantine_log: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """`consumed`, and whether it is what the plan of this configuration says.

    Checks that steps follow one another, that each has exactly the samples of the plan, that no sample occurs twice in
    an epoch, that finished epochs hold every usable sample, and that the checkpoint's ledger belongs to this plan. What
    lies before a change of the data cannot be planned again: there only order and repeats are checked.

    Args:
        packs_per_step: As given to the loader.
        state: The ledger state of the newest checkpoint.

    Returns:
        The figures of `consumed` and `verified`: `steps` compared with the plan, `finished_epochs` by source,
        `num_problems`, the first `problems` and `notes`, each a sentence.

    Raises:
        DataError: The log, the index or the tokenizer cannot be read.
    """
    files = ShardFiles(config.store)
    try:
        tokenizer = load_tokenizer(config.tokenizer)
        sources = [SourceIndex(source, config, tokenizer, files) for source in config.sources]
        planner = Planner(config, sources, rows_per_step=packs_per_step)
        steps, marks = count_lines(audit_log)
        tally, check = _Tally(), _Check(config, sources, planner, marks=marks, state=state)
        for line in read_log(audit_log):
            tally.add(line)
            check.add(line)
            if progress is not None and line.kind == "rows":
                progress(tally.steps, steps)
        check.finish(identities(config, sources, tokenizer, packs_per_step), tally.changes)
    finally:
        files.close()
    return tally.figures(state, quarantine_log) | {"verified": check.result()}


class _Tally:
    """Counts over the lines of a log."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._first: AuditLine | None = None
        self._last: AuditLine | None = None
        self.steps, self._rows = 0, 0
        self._samples: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._epochs: Counter[str] = Counter()  # begun

    def add(self, line: AuditLine) -> None:
        self._first, self._last = self._first or line, line
        if line.kind == "change":
            self.changes.append(line.change)
        self.steps += line.kind == "rows"
        self._rows += sum(map(bool, line.rows))
        self._tokens.update(line.tokens)
        for row in line.rows:
            for source, epoch, _, _ in row:
                self._samples[source] += 1
                if epoch >= self._epochs[source]:
                    self._epochs[source] = epoch + 1

    def figures(self, state: dict[str, Any] | None, quarantine_log: Path | None) -> dict[str, Any]:
        last_step = 0 if self._last is None else self._last.step
        saved_step = None if state is None else state["plan"]["step"]
        bad = Counter(bad.source for bad in read_quarantine(quarantine_log)) if quarantine_log else Counter()
        return {
            "steps": self.steps,
            "first_step": last_step - self.steps + 1 if self.steps else 0,
            "last_step": last_step,
            "checkpoint_step": saved_step,
            "steps_after_checkpoint": None if saved_step is None else max(0, last_step - saved_step),
            "began": None if self._first is None else self._first.when,
            "ended": None if self._last is None else self._last.when,
            "rows": self._rows,
            "samples": self._samples.total(),
            "tokens": self._tokens.total(),
            "sources": {
                name: {
                    "samples": count,
                    "tokens": self._tokens[name],
                    "epochs_begun": self._epochs[name],
                    "bad_samples": bad[name],
                }
                for name, count in self._samples.items()
            },
            "dropped": {} if state is None else dict(state["plan"]["dropped"]),
            "bad_samples": bad.total(),
            "changes": self.changes,
        }


class _Check:
    """Holds the lines of a log against the plan, one after another."""

    def __init__(
        self,
        config: DataConfig,
        sources: list[SourceIndex],
        planner: Planner,
        *,
        marks: int,
        state: dict[str, Any] | None,
    ) -> None:
        self._config, self._sources, self._planner = config, sources, planner
        self._marks_left = marks  # the plan is known after the last of them
        self._state = state
        self._saved = None if state is None else saved_plan(state)
        self._use: dict[tuple[str, int], EpochUse] = defaultdict(EpochUse)
        self._whole_from = dict.fromkeys((source.name for source in sources), 0)  # first epoch the log holds whole
        self._usable: dict[str, UsableSamples] = {}
        self._closed: Counter[str] = Counter()  # epochs of a source that were looked at
        self._finished: Counter[str] = Counter()  # and found to be whole
        self._last_step, self._planned_step, self._compared = 0, 0, 0
        self._num_problems = 0
        self._problems: list[str] = []
        self._notes: list[str] = []

    def add(self, line: AuditLine) -> None:
        if line.kind != "rows":
            self._pass_mark(line)
            return
        if line.step != self._last_step + 1:
            what = "is missing" if line.step > self._last_step + 1 else f"follows {self._last_step}"
            at = self._last_step + 1 if line.step > self._last_step + 1 else line.step
            self._problem(f"step {at} {what}, the log goes on with step {line.step}")
        self._last_step = line.step
        for row in line.rows:
            for source, epoch, shard, number in row:
                if not self._use[source, epoch].add(shard, number):
                    self._problem(
                        f"step {line.step}: {shard} row {number} of {source} was used before in epoch {epoch}"
                    )
        if not self._marks_left:
            self._compare(line)

    def finish(self, names: dict[str, str], changes: list[Change]) -> None:
        """After the last line: does the checkpoint belong to this log?"""
        if self._state is None:
            return
        saved_step = self._state["plan"]["step"]
        if saved_step > self._last_step:
            self._problem(f"steps {self._last_step + 1} to {saved_step} of the checkpoint are not in the log")
        elif saved_step < self._last_step:
            self._notes.append(
                f"the log is {self._last_step - saved_step} steps ahead of the newest checkpoint: they are dropped "
                "and done again when the run is resumed"
            )
        different = differences(self._state["identities"], names)
        accepted = {
            name: pair
            for change in changes
            if change not in self._state["changes"]
            for name, pair in change["sources"].items()
        }
        if different and all(name in accepted for name in changed_data(different)) and changed_data(different):
            self._notes.append("the newest checkpoint was written before the data changed")
            return
        try:
            open_state(self._state, names, sources=[source.name for source in self._sources])
        except DataError as error:
            self._problem(str(error), first=True)  # it explains the others

    def result(self) -> dict[str, Any]:
        return {
            "steps": self._compared,
            "finished_epochs": dict(self._finished),
            "num_problems": self._num_problems,
            "problems": self._problems,
            "notes": self._notes,
        }

    def _pass_mark(self, line: AuditLine) -> None:
        self._marks_left -= 1
        if line.kind == "branch":
            if self._last_step:
                self._problem(f"steps {self._last_step + 1} to {line.step} are missing")
            self._notes.append(f"steps 1 to {line.step} are in the log of the run that this one was branched from")
        else:
            self._notes.append(
                f"data of {', '.join(sorted(line.change['sources']))} changed after step {line.step}, accepted by "
                f"{line.change['who']}: what lies before could be checked for order and repeats only"
            )
            for name, epoch in list(self._use):
                if name in line.change["sources"]:
                    del self._use[name, epoch]  # its shards may have other names now
        self._last_step = self._planned_step = line.step
        # Limits that follow from the data may have changed too, so of no source the epoch begun then can be whole.
        self._whole_from = {
            name: epoch + (position > 0)
            for name, (epoch, position) in zip(line.sources, line.plan["drawn_at"], strict=True)
        }
        names = [source.name for source in self._sources]
        if not self._marks_left and line.sources != names:
            self._problem(
                f"after step {line.step} the run went on with the sources {' '.join(line.sources)}, but this "
                f"configuration has {' '.join(names)}: nothing after it could be compared"
            )
            self._marks_left = 1  # for good: no plan to compare with
        elif not self._marks_left:
            self._planner.load_state(line.plan)

    def _compare(self, line: AuditLine) -> None:
        planned: PlannedStep | None = None
        while self._planned_step < line.step:
            planned = self._planner.next_step()
            if planned is None:
                self._problem(f"step {line.step} is logged, but the plan ends at step {self._planned_step}")
                self._planned_step = line.step
                return
            self._planned_step = planned.step
        if planned is None:
            return  # a repeated step, which was named already
        self._compared += 1
        expected = logged_step(planned, self._sources)
        if expected["rows"] != line.rows:
            self._problem(f"step {line.step}: {_first_difference(expected['rows'], line.rows)}")
        elif expected["tokens"] != line.tokens:
            self._problem(f"step {line.step}: tokens {line.tokens} are logged, the plan has {expected['tokens']}")
        saved = self._saved
        if saved is not None and saved["step"] == planned.step and saved != json.loads(json.dumps(planned.state_after)):
            self._problem(f"step {planned.step}: the newest checkpoint stands at another place of the plan")
        self._close_epochs(planned.state_after)

    def _close_epochs(self, state: dict[str, Any]) -> None:
        """Look at the epochs of which nothing can come any more: drawn to the end, and nothing of them waits."""
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
            limits = (self._config.packing.seq_length, self._planner.largest_sample)
            self._usable[source.name] = UsableSamples(source, *limits)
        wrong = use.compare(self._usable[source.name])
        if wrong is None:
            self._finished[source.name] += 1
        else:
            self._problem(f"epoch {epoch} of {source.name}: {wrong}")

    def _problem(self, text: str, *, first: bool = False) -> None:
        self._num_problems += 1
        if first or self._num_problems <= _PROBLEMS_NAMED:
            self._problems.insert(0 if first else len(self._problems), text)


def _first_difference(expected: list[Any], logged: list[Any]) -> str:
    if len(expected) != len(logged):
        return f"{len(logged)} rows are logged, the plan has {len(expected)}"
    row = next(number for number, (a, b) in enumerate(zip(expected, logged, strict=True)) if a != b)
    ours, theirs = expected[row], logged[row]
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    shown = [str(side[place]) if place < len(side) else "nothing" for side in (theirs, ours)]
    return f"row {row} has {shown[0]} as sample {place}, the plan has {shown[1]}"
