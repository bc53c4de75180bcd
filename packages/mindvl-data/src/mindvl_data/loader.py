# SPDX-License-Identifier: Apache-2.0
"""Loader: plan, read, parse, tokenize, decode, collate, in order, on one screen.

The front of this package: an iterator over the packed rows of one data-parallel rank. Threads make rows ahead of the
training step; the order is always the plan's. The only state is the plan's, so a resumed run gives the very same
rows.
"""

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from mindvl_data.collate import collate
from mindvl_data.config import DataConfig
from mindvl_data.encode import decode_sample, encode_sample, placeholder
from mindvl_data.errors import BadSample, DataError
from mindvl_data.plan.planner import PlannedSample, PlannedStep, Planner, Row, rows_of_rank
from mindvl_data.plan.sources import SourceIndex
from mindvl_data.positions import PositionKind
from mindvl_data.shards.files import ShardFiles
from mindvl_data.tokenization import load_tokenizer
from mindvl_data.tracker import AuditLog, identities, open_state, seal_state
from mindvl_data.types import Batch, PackedSample, Segment, TokenizedSample

logger = logging.getLogger(__name__)

_BAD_SAMPLES_FORGIVEN = 16  # before the share of bad samples means anything


class Loader:
    """Iterates over packed rows; `packs_per_step / dp_size` of them make one optimizer step on this rank.

    Args:
        packs_per_step: Rows of one step over all data-parallel ranks.
        dp_rank, dp_size: The data-parallel coordinate, given by the trainer.
        position_kind: "rope" counts tokens; "mrope" gives visual tokens their place in the picture.

    Raises:
        DataError: A source is not indexed, or the settings do not fit each other.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        packs_per_step: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        position_kind: PositionKind,
    ) -> None:
        if packs_per_step < 1 or packs_per_step % dp_size or not 0 <= dp_rank < dp_size:
            raise DataError(
                f"packs_per_step={packs_per_step} cannot be dealt to dp_rank={dp_rank} of dp_size={dp_size}. Loader. "
                "Use a multiple of dp_size."
            )
        self._config = config
        self._packs_per_step = packs_per_step
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._position_kind: PositionKind = position_kind
        self._files = ShardFiles()
        self._tokenizer = load_tokenizer(config.tokenizer)
        self._sources = [SourceIndex(s, config, self._tokenizer, self._files) for s in config.sources]
        self._identities = identities(config, self._sources, self._tokenizer, packs_per_step)
        self._audit = AuditLog(config.audit_log, self._sources) if config.audit_log and dp_rank == 0 else None
        self._threads = (
            ThreadPoolExecutor(config.num_threads, thread_name_prefix="mindvl-data") if config.num_threads else None
        )
        self._start(plan_state=None)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next row of this rank; StopIteration once every source with an epoch cap is used up."""
        self._make_ahead()
        if not self._pending:
            raise StopIteration
        step, is_last, made = self._pending.popleft()
        batch = made.result() if isinstance(made, Future) else self._make(step, made)
        self._count_bad(batch)
        if is_last:
            self._state = step.state_after
            if self._audit is not None:
                self._audit.record(step)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last complete step handed out; JSON values, the same on every rank."""
        return seal_state(self._state, self._identities)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly after the step that `state` was taken at, whatever the number of ranks was.

        Raises:
            DataError: The state is damaged or belongs to another recipe, index, tokenizer or processor.
        """
        plan_state = open_state(state, self._identities)
        self._start(plan_state=plan_state)
        if self._audit is not None:
            self._audit.rewind(plan_state["step"])

    def report(self) -> dict[str, Any]:
        """Figures of all complete steps, over ranks and restarts; `bad_samples` are this rank's since its start."""
        return self._planner.figures(self._state) | {"bad_samples": self._num_bad}

    def close(self) -> None:
        """Stop the threads and close all files."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()
        self._files.close()
        if self._audit is not None:
            self._audit.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, plan_state: dict[str, Any] | None) -> None:
        self._planner = Planner(self._config, self._sources, rows_per_step=self._packs_per_step)
        if plan_state is not None:
            self._planner.load_state(plan_state)
        self._state = self._planner.state()
        self._rows = self._plan_rows()
        self._pending: deque[tuple[PlannedStep, bool, Future[Batch] | Row]] = deque()
        self._num_samples, self._num_bad = 0, 0

    def _plan_rows(self) -> Iterator[tuple[PlannedStep, bool, Row]]:
        """This rank's rows, each with whether it is the last of its step."""
        while (step := self._planner.next_step()) is not None:
            rows = rows_of_rank(step.rows, dp_rank=self._dp_rank, dp_size=self._dp_size)
            for number, row in enumerate(rows, 1):
                yield step, number == len(rows), row

    def _make_ahead(self) -> None:
        """Keep `prefetch_packs` rows in the making."""
        while len(self._pending) < self._config.prefetch_packs and (planned := next(self._rows, None)) is not None:
            step, is_last, row = planned
            made = row if self._threads is None else self._threads.submit(self._make, step, row)
            self._pending.append((step, is_last, made))

    def _make(self, step: PlannedStep, row: Row) -> Batch:
        made = [self._load(planned) for planned in row]
        return collate(
            PackedSample(samples=tuple(m[0] for m in made), segments=tuple(m[1] for m in made)),
            step=step.step,
            position_kind=self._position_kind,
            pad_id=self._tokenizer.pad_id,
            image_pad_id=self._tokenizer.image_pad_id,
            pad_multiple=self._config.packing.pad_multiple,
            patch_dim=self._config.image.patch_dim,
            spatial_merge_size=self._config.image.spatial_merge_size,
        )

    def _load(self, planned: PlannedSample) -> tuple[TokenizedSample, Segment]:
        source = self._sources[planned.source]
        shard = source.index.shards[planned.shard].path
        key, bad = "", False
        try:
            raw = source.read(planned.shard, planned.row)
            key = raw.key
            encoding = encode_sample(raw, rules=source.rules, tokenizer=self._tokenizer)
            if encoding.num_tokens != planned.length:
                raise BadSample(f"{encoding.num_tokens} tokens instead of the planned {planned.length}")
            tokenized = decode_sample(raw, encoding, tokenizer=self._tokenizer)
        except BadSample as error:
            logger.warning(
                "bad sample: %s. source %s, %s row %d, key %r. A zero-loss placeholder takes its place.",
                error, source.name, shard, planned.row, key,
            )  # fmt: skip
            patch_dim, pad_id = self._config.image.patch_dim, self._tokenizer.pad_id
            tokenized, bad = placeholder(planned.length, patch_dim=patch_dim, pad_id=pad_id), True
        segment = Segment(
            source=source.name, epoch=planned.epoch, shard=shard.name, row=planned.row, key=key,
            length=planned.length, bad=bad,
        )  # fmt: skip
        return tokenized, segment

    def _count_bad(self, batch: Batch) -> None:
        bad = sum(segment.bad for segment in batch.segments)
        self._num_samples += len(batch.segments)
        self._num_bad += bad
        if bad and self._num_bad > max(_BAD_SAMPLES_FORGIVEN, self._config.max_bad_share * self._num_samples):
            raise DataError(
                f"{self._num_bad} of {self._num_samples} samples could not be decoded. "
                f"data.max_bad_share={self._config.max_bad_share}. The log names them; mend or leave out their source."
            )
