# SPDX-License-Identifier: Apache-2.0
"""Loader: plan, make packs, hand them out, in order, on one screen.

The front of this package: an iterator over the packed packs of one data-parallel rank. Steps are planned in one
thread and packs made in others, ahead of the training step; the order is always the plan's. The only state is the
plan's, so a resumed run gives the very same packs.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from mindvl_data.audit_log import AuditLog, now
from mindvl_data.config import DataConfig
from mindvl_data.errors import DataError
from mindvl_data.order.data_order import DataOrder, OrderedStep, Pack, packs_of_rank
from mindvl_data.order.sources import SourceIndex
from mindvl_data.pack_builder import BuiltPack, PackBuilder
from mindvl_data.positions import PositionKind
from mindvl_data.prefetch import OrderPrefetcher, Workers
from mindvl_data.process import OwnProcess
from mindvl_data.quarantine import FailedSample, QuarantineLog, quarantine_sizes
from mindvl_data.shards.files import ShardFiles
from mindvl_data.tokenization import load_tokenizer
from mindvl_data.tracker import Change, identities, open_state, seal_state
from mindvl_data.types import Batch, SampleReference

_MAX_FAILED_UNCHECKED = 16  # before the share of bad samples means anything


@dataclass(frozen=True, kw_only=True)
class _AssignedPack:
    """A pack that this process has to hand out."""

    step: OrderedStep
    is_last: bool  # of this rank's packs of the step
    pack: Pack
    state: dict[str, Any]  # the planner's, after the newest step that is complete once this pack is handed out


@dataclass(frozen=True, kw_only=True)
class _PendingPack(_AssignedPack):
    """A pack in the making, or made."""

    expected_bytes: int
    made: Future[BuiltPack] | None = None  # None: it is made when it is asked for

    @property
    def num_bytes(self) -> int:
        """Bytes it takes or will take: guessed from the plan until it is there."""
        if self.made is None or not self.made.done() or self.made.exception() is not None:
            return self.expected_bytes
        return self.made.result().num_bytes


class Loader:
    """Iterates over packed packs; `global_batch_size / dp_size` of them make one optimizer step on this rank.

    It is itself a loader, with its own threads: use it in place of torch's DataLoader, not inside one. Every process
    of a data-parallel rank makes one (tensor-parallel peers the same one, but only one of them with logs), takes its
    packs with `next`, and saves `state_dict()` with its checkpoint:

        loader = Loader(config, global_batch_size=32, dp_rank=rank, dp_size=world_size, position_kind="rope")
        loader.load_state_dict(saved)                       # to go on; any other number of ranks will do
        packs = [next(loader).to(device) for _ in range(32 // world_size)]
        model(**packs[0].model_inputs())
        saved = loader.state_dict()                         # after the optimizer's step; plain JSON values

    The packs of a step are the same for any number of ranks and threads, and a rank reads only what its own packs need.

    Args:
        global_batch_size: Packs of one step over all data-parallel ranks.
        dp_rank, dp_size: The data-parallel coordinate, given by the trainer.
        position_kind: "rope" counts tokens; "mrope" and "mrope_all_axes" give visual tokens their place in the image
            and differ after a video, see positions.py.
        vocab_size: Tokens in the model's embedding: a pack with an id beyond it is refused. None: only
            negative ids are.
        with_pixels: False leaves out the patches of packs and decodes nothing, for processes that need the text only.
        on_thread_start: Called first in each thread that plans or makes packs, such as to bind it to cores.
        worker: Number of this process and their count where several processes make the packs of this rank in turn
            (packed_dataset.py); it hands out every num_workers-th pack of the rank.

    Raises:
        DataError: A source is not indexed, or the settings do not fit each other.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        position_kind: PositionKind,
        vocab_size: int | None = None,
        with_pixels: bool = True,
        on_thread_start: Callable[[], None] | None = None,
        worker: tuple[int, int] = (0, 1),
    ) -> None:
        if global_batch_size < 1 or dp_size < 1 or global_batch_size % dp_size or not 0 <= dp_rank < dp_size:
            raise DataError(
                f"global_batch_size={global_batch_size} cannot be dealt to dp_rank={dp_rank} of dp_size={dp_size}. Loader. "
                "Use a multiple of dp_size, which is at least 1 and above dp_rank."
            )
        self._process = OwnProcess("Loader")
        self._config = config
        self._on_thread_start = on_thread_start
        self._global_batch_size = global_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._worker, self._num_workers = worker
        self._files = ShardFiles(config.store)
        tokenizer = load_tokenizer(config.tokenizer)
        self._sources = [SourceIndex(s, config, tokenizer, self._files) for s in config.sources]
        self._builder = PackBuilder(
            config,
            self._sources,
            tokenizer=tokenizer,
            files=self._files,
            position_kind=position_kind,
            with_pixels=with_pixels,
            vocab_size=vocab_size,
        )
        self._names = [source.name for source in config.sources]
        self._identities = identities(config, self._sources, tokenizer, global_batch_size)
        self._audit = None
        if config.audit_log is not None and dp_rank == 0:
            before = quarantine_sizes(config.quarantine_log)
            self._audit = AuditLog(config.audit_log, self._sources, self._identities, before)
        self._quarantine = QuarantineLog(config.quarantine_log, dp_rank=dp_rank) if config.quarantine_log else None
        self._failure: DataError | None = None  # raised by every `next` until a state is loaded
        self._start(self._new_data_order(), changes=[])
        self._workers = Workers(config.num_threads, "mindvl-data", on_thread_start) if config.num_threads else None
        self._is_closed = False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next pack of this rank; StopIteration once every source with an epoch cap is used up.

        Raises:
            DataError: Data cannot be read, too many samples cannot be used, or a log cannot be written. The loader
                stays where it failed: the pack is tried again by the next call, or by a loader that goes on from the
                state.
        """
        self._process.check()
        if self.is_used_up():
            raise StopIteration
        first = self._pending[0]
        made = self._builder.make(first.step.step, first.pack) if first.made is None else first.made.result()
        self._record_failed(made.failed, num_samples=len(made.batch.samples))
        if first.is_last and self._audit is not None:
            self._audit.record(first.step)
        # Only now: an interrupt while waiting, or a log that cannot be written, must not lose a pack.
        self._pending.popleft()
        if self._returned and self._returned[0][0] != first.step.step:
            self._returned.clear()
        self._returned.append((first.step.step, made.batch.samples, first.pack))
        self._num_samples += len(made.batch.samples)
        self._num_failed += len(made.failed)
        self._state = first.state
        self._prepare(wait=False)
        return made.batch

    def is_used_up(self) -> bool:
        """Whether `next` would end: no pack is left. Waits until the next step is planned.

        After the last pack of a step every rank gets the same answer.

        Raises:
            DataError: As `next`.
        """
        self._process.check()
        if self._is_closed:
            raise DataError("loader is closed. Loader. Make a new one.")
        if self._failure is not None:
            raise self._failure
        self._is_untouched = False
        self._prepare(wait=True)
        return not self._pending

    def rebuild(self, batch: Batch, failed: Sequence[bool]) -> Batch:
        """A pack of the newest step once more, with placeholders for these samples, as if they could not be decoded.

        Processes that train the same packs need it: where one of them cannot use a sample, none may. Without pixels
        nothing is decoded, so that such a process learns of a damaged image only from the others.

        Args:
            batch: As it was handed out, or moved to a device.
            failed: One flag per sample of the pack, including the samples that had failed before.

        Raises:
            DataError: Too many samples cannot be used, or the log cannot be written.
        """
        self._process.check()
        pack = next(pack for _, samples, pack in self._returned if samples is batch.samples)
        made = self._builder.make(
            batch.step, pack, refused=[place for place, has_failed in enumerate(failed) if has_failed]
        )
        known = {(s.source, s.shard, s.sample_index) for s in batch.samples if s.failed}
        new = tuple(use for use in made.failed if (use.source, use.shard, use.sample_index) not in known)
        self._record_failed(new, num_samples=0)
        self._num_failed += len(new)
        return made.batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last complete step handed out; JSON values, the same on every rank.

        The audit log is on disk up to that step when this returns.
        """
        self._process.check()
        if self._audit is not None and not self._is_closed:
            self._audit.sync()
        return seal_state(self._state, self._identities, sources=self._names, changes=self._changes)

    def load_state_dict(
        self, state: dict[str, Any], *, accept_change: str | None = None, parent_log: Path | None = None
    ) -> None:
        """Go on exactly after the step that `state` was taken at, whatever the number of ranks was.

        In the middle of a run it waits for the step being planned, however long a read of it takes: what that read
        uses is used by the new plan too. A new loader never waits.

        Args:
            accept_change: Who accepts that data changed, such as user@host. Sources whose index, `first` or
                `fraction` changed then go on at the start of their next epoch; sources may come and go. It is kept in
                the state and in the audit log.
            parent_log: The audit log of the run that saved the state. Where this loader writes another one, a mark
                in it names the parent, which holds the steps before.

        Raises:
            DataError: The state is damaged or belongs to another recipe, index, tokenizer or processor, or the audit
                log cannot go on from it: the loader goes on as if nothing had been asked. Or the log cannot be
                written: the loader gives no pack until a state is loaded.
        """
        self._process.check()
        opened = open_state(state, self._identities, sources=self._names, accept_change=accept_change)
        if self._audit is not None:
            self._audit.claim(opened.order["step"])
        self._failure = DataError(
            "a state was loaded in part only. Loader. Load a state once more, or make a new loader."
        )
        self._prefetcher.finish()
        data_order = self._data_order if self._is_untouched else self._new_data_order()
        self._is_untouched = False
        changes = opened.changes
        data_order.load_state(opened.order, changed_sources=opened.other_data)
        if opened.changed:
            about = {name: list(pair) for name, pair in opened.changed.items()}
            changes = [*changes, {"step": opened.order["step"], "who": accept_change, "when": now(), "sources": about}]
        if self._audit is not None:
            self._audit.resume(
                opened.order["step"],
                data_order.state(),
                changes,
                parent=self._relative_to_log(parent_log),
                quarantine=quarantine_sizes(self._config.quarantine_log),
            )
        self._start(data_order, changes=changes)

    def report(self) -> dict[str, Any]:
        """Figures of all complete steps, over ranks and restarts; and what this rank did since it started.

        Returns:
            The planner's figures; `failed_samples` and `reads` (bytes and requests) of this rank alone.
        """
        self._process.check()
        return self._data_order.figures(self._state) | {
            "failed_samples": self._num_failed,
            "reads": self._files.report(),
        }

    def close(self) -> None:
        """Stop the threads and close all files; waits a few seconds at most for a read that hangs."""
        if not self._process.is_current:
            return  # a fork has none of the threads, and the files are its parent's
        self._is_closed = True
        self._prefetcher.close()
        if self._workers is not None:
            self._workers.close()
        self._pending.clear()
        self._files.close()
        for log in (self._audit, self._quarantine):
            if log is not None:
                log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _relative_to_log(self, parent_log: Path | None) -> str | None:
        """As the audit log names it: runs that are moved together find each other."""
        if parent_log is None or self._config.audit_log is None:
            return None
        return os.path.relpath(parent_log, self._config.audit_log.parent)

    def _new_data_order(self) -> DataOrder:
        self._is_untouched = True  # a state can be loaded into it
        return DataOrder(self._config, self._sources, global_batch_size=self._global_batch_size)

    def _start(self, data_order: DataOrder, *, changes: list[Change]) -> None:
        """Go on with a data_order that stands where the next pack is wanted."""
        for waiting in getattr(self, "_pending", ()):
            if waiting.made is not None:
                waiting.made.cancel()
        self._data_order = data_order
        num_steps = self._config.order_ahead_steps if self._config.num_threads else 0
        self._prefetcher = OrderPrefetcher(data_order, num_steps=num_steps, on_start=self._on_thread_start)
        self._state = self._state_ahead = data_order.state()
        self._changes = changes
        self._num_assigned: int = 0  # packs of this rank that were planned, those of other workers included
        self._assigned: deque[_AssignedPack] = deque()  # packs that nobody works on yet
        self._pending: deque[_PendingPack] = deque()
        self._returned: list[
            tuple[int, tuple[SampleReference, ...], Pack]
        ] = []  # step, samples and plan of its newest packs
        self._is_over = False
        self._failure = None
        self._num_samples: int = 0
        self._num_failed: int = 0

    def _prepare(self, *, wait: bool) -> None:
        """Have up to `prefetch_packs` packs in the making, within `prefetch_bytes`; one always.

        Args:
            wait: Whether to wait for the plan while no pack waits; else take what is planned already.
        """
        while len(self._pending) < self._config.prefetch_packs and self._has_assigned(wait and not self._pending):
            assigned = self._assigned[0]
            step, pack = assigned.step, assigned.pack
            expected = self._builder.expected_bytes(pack)
            if self._pending and sum(w.num_bytes for w in self._pending) + expected > self._config.prefetch_bytes:
                return
            self._assigned.popleft()
            made = None if self._workers is None else self._workers.submit(partial(self._builder.make, step.step, pack))
            self._pending.append(_PendingPack(**vars(assigned), expected_bytes=expected, made=made))

    def _has_assigned(self, wait: bool) -> bool:
        while not self._assigned and not self._is_over and (wait or self._prefetcher.is_ready):
            step = self._prefetcher.next_step()
            if step is None:
                self._is_over = True
                break
            packs = packs_of_rank(step.packs, dp_rank=self._dp_rank, dp_size=self._dp_size)
            for number, pack in enumerate(packs, 1):
                is_last = number == len(packs)
                if self._num_assigned % self._num_workers == self._worker:
                    state = step.state_after if is_last else self._state_ahead
                    self._assigned.append(_AssignedPack(step=step, is_last=is_last, pack=pack, state=state))
                self._num_assigned += 1
            self._state_ahead = step.state_after
        return bool(self._assigned)

    def _record_failed(self, uses: Sequence[FailedSample], *, num_samples: int) -> None:
        for sample in uses:
            if self._quarantine is not None:
                self._quarantine.record(sample)
        num_samples, num_failed = self._num_samples + num_samples, self._num_failed + len(uses)
        if uses and num_failed > max(_MAX_FAILED_UNCHECKED, self._config.max_failed_share * num_samples):
            self._failure = DataError(
                f"{num_failed} of {num_samples} samples could not be decoded. "
                f"data.max_failed_share={self._config.max_failed_share}. The log names them; mend or leave out their source."
            )
            raise self._failure
