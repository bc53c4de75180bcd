# SPDX-License-Identifier: Apache-2.0
"""PackedDataset: the packs of a data-parallel rank as a torch IterableDataset, for training loops of other projects.

Comes after the loader; used through torch's DataLoader or webdataset's WebLoader.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from mindvl_data.config import DataConfig
from mindvl_data.errors import DataError
from mindvl_data.loader import Loader
from mindvl_data.positions import PositionKind
from mindvl_data.types import Batch


class PackedDataset(IterableDataset[Batch]):
    """The packs of `Loader` in the same order, for any number of DataLoader workers.

    Each item is a `Batch`, which is one packed sequence, so the batching of the DataLoader is disabled.

        dataset = PackedDataset(config, global_batch_size=8, dp_rank=rank, dp_size=world_size, position_kind="mrope")
        for batch in DataLoader(dataset, batch_size=None, num_workers=2):
            ...
            saved = dataset.state_dict(batch)

    Worker w of W builds the packs w, w + W, ... of the rank, which is the order in which a DataLoader collects them
    (keep its `in_order=True`). Every iteration starts at the state loaded last, or at the beginning. Without workers
    `config.num_threads` threads build packs ahead; a worker builds its packs itself, `prefetch_factor` ahead.

    Args:
        global_batch_size: Packed sequences per optimizer step, over all data-parallel ranks.
        dp_rank, dp_size: Data-parallel rank of this process and number of ranks. Do not add a splitter by rank or worker.
        position_kind: "mrope" for Qwen2-VL and Qwen2.5-VL, "rope" for models that count tokens.
        vocab_size: Number of rows of the model's embedding: a pack with a larger token id is refused.

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
    ) -> None:
        self._config = config
        self._loader_options: dict[str, Any] = {
            "global_batch_size": global_batch_size,
            "dp_rank": dp_rank,
            "dp_size": dp_size,
            "position_kind": position_kind,
            "vocab_size": vocab_size,
        }
        self._start: tuple[dict[str, Any], str | None] | None = None  # state, and the user who accepts changed data
        self._newest: dict[str, Any] | None = None  # after the newest pack of an iteration in this process
        self._num_loaded = 0  # number of loaded states
        # Shared with the workers: whether any began to iterate, and _num_loaded of the process that trains.
        self._is_in_workers, self._all_loaded = torch.zeros(2, 1, dtype=torch.int64).share_memory_()
        with self._silent_loader() as loader:
            self._beginning = loader.state_dict()

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the packs of this rank, or in a DataLoader worker over its share of them.

        Raises:
            DataError: See `Loader.__next__`; or `audit_log` is set with several processes.
        """
        worker = get_worker_info()
        config = self._config
        if worker is not None:
            if config.audit_log is not None:
                raise DataError(
                    f"PackedDataset: audit_log={config.audit_log} requires a single process, but the DataLoader has "
                    f"num_workers={worker.num_workers}. Use num_workers=0, or omit audit_log."
                )
            if int(self._all_loaded) != self._num_loaded:
                raise DataError(
                    "PackedDataset: a state was loaded after the persistent workers of the DataLoader had started, "
                    "so they do not have it. Create a new DataLoader after load_state_dict."
                )
            self._is_in_workers.fill_(1)
            config = replace(config, num_threads=0)
        share = (0, 1) if worker is None else (worker.id, worker.num_workers)
        with Loader(config, **self._loader_options, worker=share) as loader:
            if self._start is not None:
                loader.load_state_dict(self._start[0], accept_change=self._start[1])
            for batch in loader:
                self._newest = loader.state_dict()
                yield replace(batch, loader_state=self._newest)

    def state_dict(self, batch: Batch | None = None) -> dict[str, Any]:
        """The position after the last complete step up to `batch`; JSON values, the same on every rank.

        Args:
            batch: The last trained pack, on any device. Required if the DataLoader has workers, because they read
                ahead of training; None: the newest pack of the newest iteration in this process.

        Raises:
            DataError: `batch` is None although workers build the packs, or it does not come from a PackedDataset.
        """
        if batch is None and int(self._is_in_workers):
            raise DataError(
                "PackedDataset.state_dict: DataLoader workers read ahead, so the position is unknown in this process. "
                "Pass the last trained batch: state_dict(batch)."
            )
        state = (self._newest or self._beginning) if batch is None else batch.loader_state
        if state is None:
            raise DataError(
                f"PackedDataset.state_dict: the batch of step {getattr(batch, 'step', None)} has no loader_state. "
                "Pass a batch of this dataset."
            )
        return state

    def load_state_dict(self, state: dict[str, Any], *, accept_change: str | None = None) -> None:
        """Start the next iteration after the step at which `state` was taken, with any number of ranks and workers.

        A state of `Loader` is accepted too. A running iteration is not affected.

        Args:
            accept_change: See `Loader.load_state_dict`.

        Raises:
            DataError: The state is damaged, or belongs to another recipe, index, tokenizer or processor.
        """
        with self._silent_loader() as loader:
            loader.load_state_dict(state, accept_change=accept_change)
        self._start, self._newest = (state, accept_change), state
        self._num_loaded += 1
        self._all_loaded.fill_(self._num_loaded)
        self._is_in_workers.fill_(0)

    def _silent_loader(self) -> Loader:
        """A loader without threads and logs, to check settings and states."""
        return Loader(replace(self._config, num_threads=0, audit_log=None, quarantine_log=None), **self._loader_options)
