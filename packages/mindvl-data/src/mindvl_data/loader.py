# SPDX-License-Identifier: Apache-2.0
"""Loader: an iterator over the packed sequences (packs) of one data-parallel rank.

The entry point of this package. One thread computes the data order and other threads build packs, both ahead of the
training step; packs are always returned in the data order. The only state is that of the data order, so a resumed run
returns bitwise identical packs.
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

_MAX_FAILED_UNCHECKED = 16  # up to this many failed samples their share is not checked: it is not yet meaningful


@dataclass(frozen=True, kw_only=True)
class _AssignedPack:
    """A pack assigned to this process."""

    step: OrderedStep
    is_last: bool  # whether it is this rank's last pack of the step
    pack: Pack
    state: dict[str, Any]  # of the data order, after the newest step that is complete once this pack is returned


@dataclass(frozen=True, kw_only=True)
class _PendingPack(_AssignedPack):
    """A pack that is being built, or was built and not yet returned."""

    expected_bytes: int
    built: Future[BuiltPack] | None = None  # None: it is built when it is requested

    @property
    def num_bytes(self) -> int:
        """Size in bytes; an estimate from the data order until the pack is built."""
        if self.built is None or not self.built.done() or self.built.exception() is not None:
            return self.expected_bytes
        return self.built.result().num_bytes


class Loader:
    """Iterates over packed sequences; `global_batch_size / dp_size` of them form one optimizer step on this rank.

    Use it in place of torch's DataLoader, not inside one: it has its own threads. Every process of a data-parallel
    rank creates one (with the same arguments on all ranks of a model-parallel group, but with logs on only one of
    them), takes its packs with `next`, and saves `state_dict()` with its checkpoint:

        loader = Loader(config, global_batch_size=32, dp_rank=rank, dp_size=world_size, position_kind="rope")
        loader.load_state_dict(saved)                       # to resume, with any number of ranks
        packs = [next(loader).to(device) for _ in range(32 // world_size)]
        model(**packs[0].model_inputs())
        saved = loader.state_dict()                         # after the optimizer step; plain JSON values

    The packs of a step are the same for any number of ranks and threads. A rank reads only the samples of its own packs.

    Args:
        global_batch_size: Packed sequences per optimizer step, over all data-parallel ranks.
        dp_rank, dp_size: Data-parallel rank of this process and number of data-parallel ranks.
        position_kind: "rope" counts tokens; "mrope" and "mrope_all_axes" encode the position of visual tokens in the
            image and differ after a video, see positions.py.
        vocab_size: Number of rows of the model's embedding: a pack with a larger token id is refused. None: only
            negative ids are refused.
        with_pixels: False omits the patches of packs and decodes nothing, for processes that need only the text.
        pin_memory: Build packs in pinned memory, from which copies to a device overlap with its work.
        on_thread_start: Called at the start of each thread, for example to bind it to cores.
        worker: Index and number of the processes that build the packs of this rank in turn (packed_dataset.py); this
            process returns every num_workers-th pack of the rank.

    Raises:
        DataError: A source is not indexed, or two settings contradict each other.
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
        pin_memory: bool = False,
        on_thread_start: Callable[[], None] | None = None,
        worker: tuple[int, int] = (0, 1),
    ) -> None:
        if global_batch_size < 1 or dp_size < 1 or global_batch_size % dp_size or not 0 <= dp_rank < dp_size:
            raise DataError(
                f"Loader: global_batch_size={global_batch_size} cannot be divided among dp_size={dp_size} data-parallel "
                f"ranks with dp_rank={dp_rank}. Use a multiple of dp_size, and 0 <= dp_rank < dp_size."
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
            pin_memory=pin_memory,
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
        """Return the next pack of this rank; StopIteration when all sources reached `max_epochs`.

        Raises:
            DataError: Data cannot be read, too many samples failed to decode, or a log cannot be written. The position
                does not change: the next call, or a loader that resumes from the state, builds the pack again.
        """
        self._process.check()
        if self.is_used_up():
            raise StopIteration
        first = self._pending[0]
        built = self._builder.build(first.step.step, first.pack) if first.built is None else first.built.result()
        self._record_failed(built.failed, num_samples=len(built.batch.samples))
        if first.is_last and self._audit is not None:
            self._audit.record(first.step)
        # Only after the log was written: an interrupt or a full disk must not lose a pack.
        self._pending.popleft()
        if self._returned and self._returned[0][0] != first.step.step:
            self._returned.clear()
        self._returned.append((first.step.step, built.batch.samples, first.pack))
        self._num_samples += len(built.batch.samples)
        self._num_failed += len(built.failed)
        self._state = first.state
        self._prepare(wait=False)
        return built.batch

    def is_used_up(self) -> bool:
        """Whether no pack is left, so that `next` raises StopIteration. Waits for the next step of the data order.

        After the last pack of a step the result is the same on every rank.

        Raises:
            DataError: As `next`.
        """
        self._process.check()
        if self._is_closed:
            raise DataError("Loader: this loader was closed. Create a new one.")
        if self._failure is not None:
            raise self._failure
        self._is_untouched = False
        self._prepare(wait=True)
        return not self._pending

    def rebuild(self, batch: Batch, failed: Sequence[bool]) -> Batch:
        """Build a pack of the newest step again, with placeholders for the given samples.

        If a sample fails to decode on one rank, every rank of its model-parallel group must mask it. A loader without
        pixels decodes nothing, so its process needs the flags of the other ranks.

        Args:
            batch: The pack as it was returned, or a copy on a device.
            failed: One flag per sample of the pack, including the samples that had failed before.

        Raises:
            DataError: Too many samples failed to decode, or the log cannot be written.
        """
        self._process.check()
        pack = next(pack for _, samples, pack in self._returned if samples is batch.samples)
        built = self._builder.build(
            batch.step, pack, masked=[index for index, has_failed in enumerate(failed) if has_failed]
        )
        known = {(s.source, s.shard, s.sample_index) for s in batch.samples if s.failed}
        new = tuple(s for s in built.failed if (s.source, s.shard, s.sample_index) not in known)
        self._record_failed(new, num_samples=0)
        self._num_failed += len(new)
        return built.batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last step whose packs were all returned; JSON values, the same on every rank.

        When this method returns, the audit log is on disk up to that step.
        """
        self._process.check()
        if self._audit is not None and not self._is_closed:
            self._audit.sync()
        return seal_state(self._state, self._identities, sources=self._names, changes=self._changes)

    def load_state_dict(
        self,
        state: dict[str, Any],
        *,
        accept_change: str | None = None,
        parent_log: Path | None = None,
        where: str = "checkpoint",
    ) -> None:
        """Continue exactly after the step at which `state` was taken, for any number of ranks.

        A loader that already returned packs first waits, without a time limit, for the step that its data order is
        computing, because the new data order uses the same files. A new loader never waits.

        Args:
            accept_change: The user who accepts that data changed, for example user@host; recorded in the state and in
                the audit log. Sources whose index, `first` or `fraction` changed continue at the start of their next
                epoch; sources may be added or removed.
            parent_log: Audit log of the run that saved the state. If this loader writes another log, a mark in it
                names the parent's log, which holds the earlier steps.
            where: Place of the state in messages, such as its file.

        Raises:
            DataError: The state is damaged or belongs to another recipe, index, tokenizer or processor, or the audit
                log cannot continue from it; the loader then continues as before. Or the log cannot be written; the
                loader then returns no pack until a state is loaded.
        """
        self._process.check()
        opened = open_state(state, self._identities, sources=self._names, accept_change=accept_change, where=where)
        if self._audit is not None:
            self._audit.claim(opened.order["step"])
        self._failure = DataError("Loader: loading a state failed halfway. Load a state again, or create a new loader.")
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
        """Statistics of all complete steps, over ranks and restarts, and of this rank since its start.

        Returns:
            The figures of the data order; `failed_samples` and `reads` (bytes and requests) of this rank alone.
        """
        self._process.check()
        return self._data_order.figures(self._state) | {
            "failed_samples": self._num_failed,
            "reads": self._files.report(),
        }

    def close(self) -> None:
        """Stop the threads and close all files; waits a few seconds at most for a read that hangs."""
        if not self._process.is_current:
            return  # a fork has none of the threads, and its parent still uses the files
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
        """The parent's log relative to the directory of this audit log, so that both runs can be moved together."""
        if parent_log is None or self._config.audit_log is None:
            return None
        return os.path.relpath(parent_log, self._config.audit_log.parent)

    def _new_data_order(self) -> DataOrder:
        self._is_untouched = True  # a state can be loaded into it
        return DataOrder(self._config, self._sources, global_batch_size=self._global_batch_size)

    def _start(self, data_order: DataOrder, *, changes: list[Change]) -> None:
        """Continue with a data order whose next step is the next one to return."""
        for pending in getattr(self, "_pending", ()):
            if pending.built is not None:
                pending.built.cancel()
        self._data_order = data_order
        num_steps = self._config.order_ahead_steps if self._config.num_threads else 0
        self._prefetcher = OrderPrefetcher(data_order, num_steps=num_steps, on_start=self._on_thread_start)
        self._state = self._state_ahead = data_order.state()
        self._changes = changes
        self._num_assigned: int = 0  # packs of this rank so far, including those of other workers
        self._assigned: deque[_AssignedPack] = deque()  # packs that no thread builds yet
        self._pending: deque[_PendingPack] = deque()
        self._returned: list[tuple[int, tuple[SampleReference, ...], Pack]] = []  # packs of the newest step
        self._is_over = False
        self._failure = None
        self._num_samples: int = 0
        self._num_failed: int = 0

    def _prepare(self, *, wait: bool) -> None:
        """Start building up to `prefetch_packs` packs within `prefetch_bytes`, at least one.

        Args:
            wait: Whether to wait for the data order if no pack is pending; otherwise use the steps already computed.
        """
        while len(self._pending) < self._config.prefetch_packs and self._has_assigned(wait and not self._pending):
            assigned = self._assigned[0]
            step, pack = assigned.step, assigned.pack
            expected = self._builder.expected_bytes(pack)
            if self._pending and sum(w.num_bytes for w in self._pending) + expected > self._config.prefetch_bytes:
                return
            self._assigned.popleft()
            job = partial(self._builder.build, step.step, pack)
            built = None if self._workers is None else self._workers.submit(job)
            self._pending.append(_PendingPack(**vars(assigned), expected_bytes=expected, built=built))

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

    def _record_failed(self, failed: Sequence[FailedSample], *, num_samples: int) -> None:
        for sample in failed:
            if self._quarantine is not None:
                self._quarantine.record(sample)
        num_samples, num_failed = self._num_samples + num_samples, self._num_failed + len(failed)
        if failed and num_failed > max(_MAX_FAILED_UNCHECKED, self._config.max_failed_share * num_samples):
            self._failure = DataError(
                f"data.max_failed_share: {num_failed} of {num_samples} samples of data-parallel rank {self._dp_rank} failed "
                f"to decode, and {self._config.max_failed_share} is allowed. The log lists them: correct or remove their "
                "source."
            )
            raise self._failure
