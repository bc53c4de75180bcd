# SPDX-License-Identifier: Apache-2.0
"""Run one part through one segment: read records, apply decisions and steps in batches, write the part's files.

Runs in a worker process (worker.py); both engines use it. The files depend on the part, the steps and the seed only. A
record that fails goes to quarantine: a batch that raises is repeated record by record.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from hashlib import blake2b
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.engine.decisions import GROUP_FACT, read_decisions
from mindvl_data.curation.engine.part_files import (
    list_path,
    read_records,
    record_frame,
    records_path,
    signature_frame,
    signatures_path,
    summary_path,
    to_json,
)
from mindvl_data.curation.engine.reading import Unreadable, read_part
from mindvl_data.curation.engine.samples import sample_frame
from mindvl_data.curation.engine.tally import Examples, count_values, example_rank, map_points, new_tally, thumbnail
from mindvl_data.curation.engine.tasks import DRAWING, LOADING, READING, WRITING, Heartbeat, Task
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import ON_WAITING, Context, Decision, Drop, Outcome, Step, find_step
from mindvl_data.errors import DataError, SampleError
from mindvl_data.formats.record import RecordError
from mindvl_data.shards.atomic import AtomicFile, write_atomically

MAP_FACTS = {"cluster", "cluster_x", "cluster_y"}  # of the step `cluster`, drawn as a map

_FIRST_BATCH = 16
_BATCH_BYTES = 64 << 20  # media of one batch
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")  # of an object, which differs from run to run

Report = Callable[[int], None]  # number of records read since the last call


class PartRun:
    """The work on one part.

    Args:
        task: The part and the segment.
        heartbeat: Shows the supervisor which record is processed.
        resources: Models that this process has loaded.
        report: Called after each batch.
    """

    def __init__(self, task: Task, heartbeat: Heartbeat, resources: dict[Any, Any], report: Report) -> None:
        self._task = task
        self._heartbeat = heartbeat
        self._report = report
        self._tally = new_tally(task.number_of_steps)
        self._lines: list[tuple[int, AtomicFile, bytes]] = []  # (record number, list, line), not yet written
        self._examples = Examples(task.seed)
        self._content = blake2b(digest_size=16)
        self._columns: dict[tuple[int, str], list[Any]] = {}
        self._decisions: dict[tuple[int, int], Decision] = {}
        self._steps: dict[int, Step] = {}
        self._batch_size = min(_FIRST_BATCH, task.limits.batch_records)
        self._slowest = 0.0
        self._waited = 0.0
        resources[ON_WAITING] = self._show_waiting
        self._context = Context(
            seed=task.seed, cache=task.cache, answers=task.answers, resources=resources, on_loading=self._show_loading
        )

    def run(self) -> None:
        """Process the part and write its files, the summary last."""
        segment, number = self._task.segment, self._task.part.number
        if segment.decisions is not None:
            self._decisions = read_decisions(segment.decisions, number)
        for index, name, _ in (*segment.steps, *((segment.signed,) if segment.signed else ())):
            self._steps[index] = find_step(name)
        with ExitStack() as stack:
            self._records = stack.enter_context(AtomicFile(records_path(segment.directory, number)))
            self._dropped = stack.enter_context(AtomicFile(list_path(segment.directory, number, "dropped")))
            self._quarantine = stack.enter_context(AtomicFile(list_path(segment.directory, number, "quarantine")))
            if segment.signed is not None:
                self._signatures = stack.enter_context(AtomicFile(signatures_path(segment.directory, number)))
            for batch in self._batches():
                self._process(batch)
                self._write_lines(batch[-1].number)
                self._report(len(batch))
            self._write_lines(None)
            self._draw()
            self._heartbeat.beat(WRITING)
        self._count_columns()
        summary = {**self._tally, "content": self._content.hexdigest()}
        write_atomically(summary_path(segment.directory, number), to_json(summary))

    # Reading

    def _batches(self) -> Iterator[list[Record]]:
        """Batches of records; records of one number stay together."""
        batch: list[Record] = []
        num_bytes = 0
        for _, group in groupby(self._readable(), key=lambda record: record.number):
            records = list(group)
            is_careful = self._is_careful(records[0].number)
            if batch and (len(batch) >= self._batch_size or num_bytes > _BATCH_BYTES or is_careful):
                yield batch
                batch, num_bytes = [], 0
            batch += records
            num_bytes += sum(len(medium) for record in records for medium in record.media)
            if is_careful:
                yield batch
                batch, num_bytes = [], 0
            self._heartbeat.beat(READING, records[-1].number)
        if batch:
            yield batch

    def _readable(self) -> Iterator[Record]:
        task = self._task
        self._heartbeat.beat(READING, (task.part.number << 32) - 1)
        if task.segment.source is not None:
            yield from read_records(records_path(task.segment.source, task.part.number))
            return
        stop = next((number for number, _, phase in task.failed if phase == READING), None)
        if stop is not None and stop < task.part.number << 32:
            self._to_quarantine(stop + 1, task.part.files[0], None, task.failed[stop, 0, READING])
            self._tally["read"] += 1
            return
        items = read_part(task.part, task.input, seed=task.seed, max_media_bytes=task.limits.media_mib << 20)
        for item in items:
            self._tally["read"] += 1
            if isinstance(item, Unreadable):
                self._to_quarantine(item.number, item.id, None, item.reason)
                continue
            try:
                content = to_json(item.body)
            except (TypeError, ValueError, RecursionError) as error:  # a table may hold dates or bytes in its messages
                self._to_quarantine(item.number, item.id, None, _reason(error))
                continue
            self._content.update(content)
            for medium in item.media:
                self._content.update(medium)
            yield item
            if item.number == stop:
                reason = f"the rest of {task.part.files[0]} cannot be read: {task.failed[stop, 0, READING]}"
                self._tally["read"] += 1
                self._to_quarantine(stop + 1, item.id, None, reason)
                return

    def _is_careful(self, number: int) -> bool:
        return any(low <= number <= high for low, high in self._task.careful)

    # Steps

    def _process(self, batch: list[Record]) -> None:
        started, waited = time.monotonic(), self._waited
        self._slowest = 0.0
        segment = self._task.segment
        records = self._applied(batch) if segment.applied is not None else batch
        for index, name, parameters in segment.steps:
            if not records:
                break
            records = self._step(index, name, parameters, records)
        self._finish(records)
        limit = self._task.limits.seconds_per_record / 8
        if self._slowest > limit:
            self._batch_size = max(1, self._batch_size // 2)
        elif time.monotonic() - started - (self._waited - waited) < limit / 4:
            self._batch_size = min(2 * self._batch_size, self._task.limits.batch_records)

    def _applied(self, batch: list[Record]) -> list[Record]:
        """Apply the decisions of the set step before this segment."""
        assert self._task.segment.applied is not None
        index, name = self._task.segment.applied
        outcomes: list[Outcome] = []
        for record in batch:
            decision = self._decisions.get((record.number, record.piece))
            if decision is None:
                outcomes.append(record)
            elif decision.drop is not None:
                outcomes.append(decision.drop)
            else:
                outcomes.append(record.with_facts(**decision.facts))
            if decision is not None and self._task.wanted:
                facts = decision.facts if decision.drop is None else decision.drop.facts
                if facts.get(GROUP_FACT) in self._task.wanted:
                    shown = record if decision.drop is not None else record.with_facts(**facts)
                    self._examples.offer(f"group {facts[GROUP_FACT]}", shown, name, decision.drop)
        return self._sorted_out(index, name, batch, outcomes)

    def _step(self, index: int, name: str, parameters: Any, records: list[Record]) -> list[Record]:
        function = self._steps[index].function
        assert function is not None
        kept: list[Record] = []
        divided: set[int] = set()  # numbers of records of which the step made several
        for chunk in self._chunks(records):
            tried, results = self._call(index, name, chunk, lambda batch: function(batch, parameters, self._context))
            divided |= {
                record.number for record, result in zip(tried, results, strict=True) if isinstance(result, list)
            }
            kept += self._sorted_out(index, name, tried, results)
        return _numbered(kept, divided) if divided else kept

    def _chunks(self, records: list[Record]) -> Iterator[list[Record]]:
        is_careful = bool(self._task.careful) and self._is_careful(records[0].number)
        size = 1 if is_careful else max(len(records), 1) if len(records) <= self._batch_size else self._batch_size
        for start in range(0, len(records), size):
            yield records[start : start + size]

    def _call(
        self, index: int, name: str, records: list[Record], function: Callable[[list[Record]], Sequence[Any]]
    ) -> tuple[list[Record], Sequence[Any]]:
        """The records that the step accepts and its results; the others go to quarantine."""
        failed = self._task.failed
        if failed:
            for record in records:
                if reason := failed.get((record.number, record.piece, index)):
                    self._to_quarantine(record.number, record.id, (index, name), reason)
            records = [record for record in records if (record.number, record.piece, index) not in failed]
        if not records:
            return [], []
        self._working = (index, records[0].number, records[0].piece, len(records), records[-1].number)
        self._heartbeat.beat(*self._working)
        started, waited = time.monotonic(), self._waited
        try:
            results = function(records)
            if len(results) != len(records):
                raise SampleError(f"the step returned {len(results)} results for {len(records)} records")
        except Exception as error:
            if isinstance(error, DataError) and not isinstance(error, SampleError | RecordError):
                raise  # of the run, such as an endpoint that does not answer
            if len(records) == 1:
                self._to_quarantine(records[0].number, records[0].id, (index, name), _reason(error))
                return [], []
            accepted: list[Record] = []
            found: list[Any] = []
            for record in records:
                one, result = self._call(index, name, [record], function)
                accepted += one
                found += result
            return accepted, found
        finally:
            self._slowest = max(self._slowest, time.monotonic() - started - (self._waited - waited))
        return records, results

    def _sorted_out(self, index: int, name: str, records: list[Record], outcomes: Sequence[Outcome]) -> list[Record]:
        """Count the outcomes of a step, list what it dropped, and return what it kept."""
        counts = self._tally["steps"][index]
        kept: list[Record] = []
        measured: list[dict[str, Any]] = []
        for record, outcome in zip(records, outcomes, strict=True):
            if isinstance(outcome, Record):
                kept.append(outcome)
                measured.append(outcome.facts)
            elif isinstance(outcome, list):
                kept += outcome
                measured += [one.facts for one in outcome]
            else:
                self._drop(index, name, record, outcome)
                measured.append(outcome.facts)
        counts["in"] += len(records)
        counts["out"] += len(kept)
        for fact in self._task.segment.gives.get(index, ()):
            column = self._columns.setdefault((index, fact), [])
            column += [facts[fact] for facts in measured if fact in facts]
        return kept

    def _drop(self, index: int, name: str, record: Record, drop: Drop) -> None:
        counts = self._tally["steps"][index]["dropped"]
        counts[drop.reason] = counts.get(drop.reason, 0) + 1
        self._examples.offer(f"{index} {drop.reason}", record, name, drop)
        if self._task.list_dropped:
            line = {"id": record.id, "step": name, "reason": drop.reason, "value": drop.value, "facts": drop.facts}
            self._lines.append((record.number, self._dropped, to_json(line) + b"\n"))

    def _to_quarantine(self, number: int, name: str, step: tuple[int, str] | None, reason: str) -> None:
        reason = _ADDRESS.sub("0x...", reason)[:500]
        self._tally["quarantined"] += 1
        if step is not None:
            counts = self._tally["steps"][step[0]]
            counts["in"] += 1
            counts["quarantined"][reason[:120]] = counts["quarantined"].get(reason[:120], 0) + 1
        line = {"id": name, "step": step[1] if step else "read", "reason": reason}
        self._lines.append((number, self._quarantine, to_json(line) + b"\n"))

    def _write_lines(self, last: int | None) -> None:
        """Write the lines about records up to a number, in input order: steps append them in an order that depends on the
        batches, whose size follows the time of the machine."""
        self._lines.sort(key=lambda entry: entry[0])
        count = len(self._lines) if last is None else sum(number <= last for number, _, _ in self._lines)
        for _, file, line in self._lines[:count]:
            file.write(line)
        del self._lines[:count]

    # Output

    def _finish(self, records: list[Record]) -> None:
        """Write the records that reached the end of the segment."""
        signed = self._task.segment.signed
        if signed is not None:
            self._sign(signed, records)
            return
        last = self._task.number_of_steps - 1
        for record in records:
            self._heartbeat.beat(WRITING, record.number, record.piece, 1, record.number)
            try:
                if reason := self._task.failed.get((record.number, record.piece, WRITING)):
                    raise SampleError(reason)
                self._records.write(sample_frame(record, self._task.name))
            except (SampleError, ValueError, TypeError, RecursionError) as error:
                self._to_quarantine(record.number, record.id, None, f"not a valid sample: {_reason(error)}")
                continue
            self._tally["written"] += 1
            self._examples.offer("kept", record, "")
            if record.facts.keys() >= MAP_FACTS:
                place = [round(float(record.facts[name]), 4) for name in ("cluster_x", "cluster_y")]
                self._tally["points"].append(
                    [example_rank(self._task.seed, record), *place, str(record.facts["cluster"])]
                )
            for name, value in record.facts.items():
                self._columns.setdefault((last + 1, name), []).append(value)

    def _sign(self, signed: tuple[int, str, Any], records: list[Record]) -> None:
        index, name, parameters = signed
        sign = self._steps[index].sign
        assert sign is not None
        for chunk in self._chunks(records) if records else ():
            tried, found = self._call(index, name, chunk, lambda batch: sign(batch, parameters, self._context))
            self._write_signatures(tried, found)

    def _write_signatures(self, records: list[Record], found: Sequence[NDArray[np.uint8]]) -> None:
        for record in records:
            self._records.write(record_frame(record))
        self._tally["written"] += len(records)
        rows = [
            (record.number, record.piece, one)
            for record, one in zip(records, found, strict=True)
            for one in (one for one in [one] if len(one))
        ]
        if rows:
            numbers = [number for number, _, one in rows for _ in range(len(one))]
            pieces = [piece for _, piece, one in rows for _ in range(len(one))]
            self._signatures.write(signature_frame(numbers, pieces, np.concatenate([one for _, _, one in rows])))

    def _draw(self) -> None:
        """Make the thumbnails of the examples."""
        for key, record, example in self._examples.chosen():
            self._heartbeat.beat(DRAWING, record.number, record.piece, 1, record.number)
            is_failed = (record.number, record.piece, DRAWING) in self._task.failed
            example["image"] = None if is_failed else thumbnail(record)
            self._tally["examples"].setdefault(key, []).append(json.loads(to_json(example)))

    def _count_columns(self) -> None:
        self._tally["points"] = map_points(self._tally["points"])
        for (index, fact), values in sorted(self._columns.items()):
            is_final = index == self._task.number_of_steps
            count_values(self._tally["facts"] if is_final else self._tally["steps"][index]["facts"], fact, values)

    def _show_loading(self, is_loading: bool) -> None:
        if is_loading:
            self._heartbeat.beat(LOADING, *self._working[1:])
        else:
            self._heartbeat.beat(*self._working)

    def _show_waiting(self, seconds: float) -> None:
        self._waited += seconds
        self._heartbeat.beat(*self._working)


def _numbered(records: Iterable[Record], divided: set[int]) -> list[Record]:
    """The records with pieces 0, 1, ... within each number in `divided`; others keep theirs, whatever is in their batch."""
    found: list[Record] = []
    for number, group in groupby(records, key=lambda record: record.number):
        if number not in divided:
            found += group
            continue
        found += [
            record if record.piece == piece else replace(record, piece=piece) for piece, record in enumerate(group)
        ]
    return found


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
