# SPDX-License-Identifier: Apache-2.0
"""Counts of consumed, trained and skipped samples of a run, from its records.

verify.py adds the lines of the audit log. A consumed sample was trained on unless its step was skipped as anomalous
(`skipped.jsonl`, written by the trainer), or a placeholder replaced it because it failed to decode on this rank or on
another rank of the model-parallel group (the quarantine logs). Steps after the newest checkpoint are counted separately.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindvl_data.audit_lines import AuditLine
from mindvl_data.errors import DataError
from mindvl_data.log_parts import lines_of
from mindvl_data.quarantine import FAILED_ELSEWHERE, LoggedUse, read_quarantine, read_uses
from mindvl_data.tracker import Change

Sample = tuple[Any, Any, Any, Any]  # source, epoch, shard, sample_index
ANOMALOUS, UNDECODABLE, MASKED = "in anomalous steps", "failed to decode", "masked on this rank"  # causes of a skip


@dataclass(frozen=True, kw_only=True)
class TrainingRecords:
    """Records of the trainer."""

    skipped: Mapping[int, frozenset[Sample]] = field(default_factory=dict)  # skipped step -> its samples
    step: int | None = None  # of the newest checkpoint, from its manifest; None: unknown
    num_skipped: int | None = None  # steps skipped up to the checkpoint, from its manifest
    num_placeholders: int | None = None  # samples replaced up to the checkpoint, from its manifest


@dataclass(frozen=True, kw_only=True)
class Link:
    """One audit log of a run or of its parents, and the records next to it."""

    audit_log: Path
    quarantine_log: Path | None
    training: TrainingRecords = field(default_factory=TrainingRecords)
    until: int | None = None  # step at which the next run was branched


def records_beside(audit_log: Path) -> Link:
    """The records of another run, in the directory of its audit log.

    Raises:
        DataError: A line of `skipped.jsonl` is damaged.
    """
    training = TrainingRecords(skipped=read_skipped(audit_log.with_name("skipped.jsonl")))
    return Link(audit_log=audit_log, quarantine_log=audit_log.with_name("quarantine.jsonl"), training=training)


def read_skipped(path: Path) -> dict[int, frozenset[Sample]]:
    """Step -> its samples, for the skipped steps of a run; empty if the file does not exist.

    Raises:
        DataError: A line is damaged.
    """
    skipped: dict[int, frozenset[Sample]] = {}
    if not path.exists():
        return skipped
    for number, text in lines_of(path, may_be_cut_off=True):
        try:
            line = json.loads(text)
            step, action = line["step"], line["action"]
            if type(step) is not int or step < 1 or action not in ("skipped", "stopped"):
                raise ValueError(
                    f"step and action: must be >= 1 and skipped or stopped, got {step!r:.40}, {action!r:.40}"
                )
            samples = frozenset(
                (source, epoch, shard, number)
                for rank in line["ranks"]
                for pack in rank["packs"]
                for source, epoch, shard, number, _ in pack
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"{path}:{number}: the line of skipped steps is damaged ({type(error).__name__}: {str(error)[:200]}). "
                "Restore the file from a copy."
            ) from error
        if action == "skipped":
            skipped[step] = samples
    return skipped


class Account:
    """Counts over the lines of a chain of logs.

    Args:
        state: The ledger state of the newest checkpoint.
    """

    def __init__(self, links: Sequence[Link], state: dict[str, Any] | None) -> None:
        self.changes: list[Change] = []
        self.num_steps = 0
        self._links, self._state = links, state
        self._saved_step = 0 if state is None else int(state["order"]["step"])
        self._uses = [_uses_by_step(link) for link in links]
        self._first: AuditLine | None = None
        self._first_step = self._last_step = 0
        self._ended: str | None = None
        self._packs = 0
        self._samples: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._epochs: Counter[str] = Counter()  # begun
        self._trained: Counter[str] = Counter()  # samples by source
        self._skipped: Counter[str] = Counter()  # samples by cause
        self._after_checkpoint = 0
        self._skipped_steps: set[int] = set()
        self._placeholders = 0
        self._disagreements: list[str] = []

    def add(self, line: AuditLine, link: int) -> None:
        """Count a line of one of the links."""
        if line.kind == "part":
            return
        self._first, self._ended, self._last_step = self._first or line, line.when, line.step
        if line.kind == "change":
            self.changes.append(line.change)
        if line.kind != "packs":
            return
        self._first_step = self._first_step or line.step
        self.num_steps += 1
        self._packs += sum(map(bool, line.packs))
        self._tokens.update(line.tokens)
        in_step: Counter[str] = Counter()
        for pack in line.packs:
            for source, epoch, _, _ in pack:
                in_step[source] += 1
                if epoch >= self._epochs[source]:
                    self._epochs[source] = epoch + 1
        self._samples.update(in_step)
        failed = self._failed_in(line, link)
        if line.step > self._saved_step:
            self._after_checkpoint += in_step.total()
            return
        self._placeholders += len(failed)
        recorded = self._links[link].training.skipped.get(line.step)
        if recorded is not None:
            if recorded != {tuple(use) for pack in line.packs for use in pack}:
                self._disagreements.append(
                    f"skipped.jsonl: the samples of step {line.step} are not those of {line.where}"
                )
            self._skipped_steps.add(line.step)
            self._skipped[ANOMALOUS] += in_step.total()
            return
        for use in failed:
            self._skipped[MASKED if use.sample.reason == FAILED_ELSEWHERE else UNDECODABLE] += 1
            in_step[use.sample.source] -= 1
        self._trained.update(in_step)

    def totals(self) -> tuple[int, int]:
        """(samples, tokens) so far."""
        return self._samples.total(), self._tokens.total()

    def disagreements(self) -> Iterator[str]:
        """Yield contradictions between records, log and checkpoint, after the last line."""
        yield from self._disagreements
        training = self._links[-1].training
        if training.step is not None and training.step != self._saved_step:
            yield f"the checkpoint was saved at step {training.step}, its ledger state is at step {self._saved_step}"
        if training.num_skipped is not None and training.num_skipped != len(self._skipped_steps):
            yield (
                f"the checkpoint counts {training.num_skipped} skipped steps, skipped.jsonl lists "
                f"{len(self._skipped_steps)} of its steps"
            )
        if training.num_placeholders is not None and training.num_placeholders != self._placeholders:
            yield (
                f"the checkpoint counts {training.num_placeholders} samples replaced by placeholders, the "
                f"quarantine logs list {self._placeholders} of its samples"
            )

    def figures(self) -> dict[str, Any]:
        """All counts as JSON values."""
        saved_step = None if self._state is None else self._saved_step
        quarantine_log = self._links[-1].quarantine_log
        failed = Counter(sample.source for sample in read_quarantine(quarantine_log)) if quarantine_log else Counter()
        return {
            "steps": self.num_steps,
            "first_step": self._first_step,
            "last_step": self._last_step,
            "checkpoint_step": saved_step,
            "steps_after_checkpoint": None if saved_step is None else max(0, self._last_step - saved_step),
            "began": None if self._first is None else self._first.when,
            "ended": self._ended,
            "packs": self._packs,
            "samples": self._samples.total(),
            "tokens": self._tokens.total(),
            "trained_on": self._trained.total(),
            "skipped": {cause: self._skipped[cause] for cause in (ANOMALOUS, UNDECODABLE, MASKED)},
            "skipped_steps": len(self._skipped_steps),
            "after_checkpoint": self._after_checkpoint,
            "sources": {
                name: {
                    "samples": count,
                    "trained_on": self._trained[name],
                    "tokens": self._tokens[name],
                    "epochs_begun": self._epochs[name],
                    "failed_samples": failed[name],
                }
                for name, count in self._samples.items()
            },
            "dropped": {} if self._state is None else dict(self._state["order"]["dropped"]),
            "failed_samples": failed.total(),
            "changes": self.changes,
        }

    def _failed_in(self, line: AuditLine, link: int) -> list[LoggedUse]:
        """The replaced samples of a step, each once, without lines written by an earlier attempt of the step."""
        uses = self._uses[link]
        if line.before:
            for step in [step for step in uses if step >= line.step]:
                uses[step] = [use for use in uses[step] if use.offset >= line.before.get(use.file, 0)]
        if not (here := uses.pop(line.step, None)):
            return []
        ordered = {(source, epoch, shard, pack) for uses in line.packs for source, epoch, shard, pack in uses}
        anywhere = {(source, shard, pack): (source, epoch, shard, pack) for source, epoch, shard, pack in ordered}
        found: dict[tuple[str, int | None, str, int], LoggedUse] = {}
        for use in here:
            sample = use.sample
            name = (sample.source, sample.epoch, sample.shard, sample.sample_index)
            if sample.epoch is None:  # a line of an earlier version
                name = anywhere.get((sample.source, sample.shard, sample.sample_index), name)
            if name not in ordered:
                self._disagreements.append(
                    f"{use.file}:{use.line}: step {line.step} has no sample {sample.sample_index} of {sample.shard} of "
                    f"{sample.source}"
                )
                continue
            found[name] = use
        return list(found.values())


def _uses_by_step(link: Link) -> dict[int, list[LoggedUse]]:
    uses: defaultdict[int, list[LoggedUse]] = defaultdict(list)
    if link.quarantine_log is not None:
        for use in read_uses(link.quarantine_log):
            uses[use.sample.step].append(use)
    return uses
