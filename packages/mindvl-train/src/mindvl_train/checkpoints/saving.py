# SPDX-License-Identifier: Apache-2.0
"""Atomic checkpoints, saved synchronously or asynchronously.

Comes after a step; directory.py finds and restore.py loads checkpoints. Every rank writes its own tensor chunks and a list
of them; when all lists exist, rank 0 joins them and renames the directory. An asynchronous save does this in a thread,
from a copy in host memory. The thread uses no collective, which could interleave with those of training; its errors are
exchanged at the next save, or at the end of the run.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mindvl_train.checkpoints.best import link_best
from mindvl_train.checkpoints.chunk_table import ChunkTable
from mindvl_train.checkpoints.directory import (
    REPLACED,
    checkpoint_name,
    complete_checkpoints,
    manifest_of,
    restore_replaced,
)
from mindvl_train.checkpoints.integrity import seal, sync, write_json
from mindvl_train.checkpoints.torch_index import join_lists
from mindvl_train.config import CheckpointConfig
from mindvl_train.errors import CheckpointError
from mindvl_train.megatron.checkpoint import Piece, optimizer_steps, owned_pieces
from mindvl_train.megatron.tensor_files import ChunkWriter
from mindvl_train.megatron.tensor_index import write_megatron_files
from mindvl_train.parallel_state import first_message
from mindvl_train.state import TrainState

logger = logging.getLogger(__name__)

# How long training waits for an asynchronous save, and how long a failing run waits for files of other processes,
# which may have ended.
TIMEOUT_S = 1500.0
_LAST_TIMEOUT_S = 60.0
Result = TypeVar("Result")


class Saver:
    """Saves the checkpoints of a run. Every rank has one; `save` and `finish` are collective over all ranks.

    The last checkpoint is complete at the end of the with block.

    Args:
        described: Configuration and parents of the run for manifests, as plain JSON values.
    """

    def __init__(self, directory: Path, config: CheckpointConfig, described: dict[str, Any]) -> None:
        self.stall_s = 0.0  # how long training waited for the last save
        self._directory, self._config, self._described = directory, config, described
        self._copies: list[Tensor] = []
        self._writing: _Writing | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self._close()

    def save(self, state: TrainState) -> Path:
        """Save the state, and remove old checkpoints by the configuration, and all later ones.

        Later checkpoints exist only if the run was resumed from an older one; they belong to the abandoned branch.

        Returns:
            Path of the checkpoint. An asynchronous save is complete only after the next `finish` or `save`.

        Raises:
            CheckpointError: A rank could not write this checkpoint, or that of the previous asynchronous save. Its files
                are removed; older checkpoints are unchanged.
        """
        began = time.monotonic()
        self.finish()
        best_step = state.validation.best_step if self._config.keep_best else None
        best = None if best_step is None else checkpoint_name(best_step)
        writing = _Writing(self._directory, self._config, checkpoint_name(state.step), best=best)
        self._writing = writing
        self._agree(writing.prepare)
        pieces, documents = self._agree(lambda: self._contents(state))
        if self._config.async_save:
            self._thread = threading.Thread(
                target=writing.run, args=(pieces, documents), name="checkpoint", daemon=True
            )
            self._thread.start()
        else:
            self._agree(lambda: writing.write(pieces))
            self._agree(lambda: writing.publish(documents))
            self._writing = None
        self.stall_s = time.monotonic() - began
        if writing.is_first:
            done = "saving asynchronously" if self._config.async_save else "saved"
            logger.info("%s: %s; training waited %.2f s", writing.name, done, self.stall_s)
        return writing.final

    @property
    def failed(self) -> bool:
        """Whether an asynchronous save failed on this rank; the next `finish` raises on all ranks."""
        return self._writing is not None and self._writing.error is not None

    def finish(self) -> None:
        """Wait for the asynchronous save, if there is one.

        Raises:
            CheckpointError: As save.
        """
        writing, thread = self._writing, self._thread
        if writing is None or thread is None:
            return
        # The writers first, so that rank 0 does not wait for the list of a rank that failed.
        writing.is_written.wait(TIMEOUT_S)
        late = None if writing.is_written.is_set() else f"writing its files took more than {TIMEOUT_S:.0f} s"
        try:
            self._agree(lambda: writing.raise_error(late))
            thread.join(TIMEOUT_S)
            self._agree(
                lambda: writing.raise_error(
                    f"publishing it took more than {TIMEOUT_S:.0f} s" if thread.is_alive() else None
                )
            )
        finally:
            self._writing = self._thread = None

    def _close(self) -> None:
        """At the end of a failed run: wait a limited time for the asynchronous save, without collectives."""
        if self._thread is not None and self._writing is not None:
            self._writing.give_up_at = time.monotonic() + _LAST_TIMEOUT_S
            self._thread.join(_LAST_TIMEOUT_S + 1)

    def _agree(self, action: Callable[[], Result]) -> Result:
        """Run an action on every rank; an error on one rank is raised on all."""
        assert self._writing is not None
        error: str | None = None
        try:
            result = action()
        except Exception as problem:  # the other ranks would wait for this rank forever
            error = _describe(problem)
        message = first_message(error)
        if message is None:
            return result
        writing, self._writing = self._writing, None
        writing.give_up_at = 0.0
        if self._thread is not None:
            self._thread.join(TIMEOUT_S)
            self._thread = None
        if writing.is_first:
            shutil.rmtree(writing.unfinished, ignore_errors=True)
        kept = complete_checkpoints(self._directory)
        raise CheckpointError(
            f"{writing.final}: could not be saved ({message}). Check the free disk space; "
            + (f"the run can resume from {kept[-1].name}." if kept else "there is no older checkpoint.")
        )

    def _contents(self, state: TrainState) -> tuple[list[Piece], dict[str, dict[str, Any]]]:
        """The tensor chunks of this rank, and the JSON files that are written once."""
        pieces = owned_pieces(state.models, state.optimizer)
        documents = {
            "ledger.json": state.source.state_dict(),
            "manifest.json": manifest_of(state, self._described, optimizer_steps(state.optimizer)),
        }
        return self._copied(pieces) if self._config.async_save else pieces, documents

    def _copied(self, pieces: list[Piece]) -> list[Piece]:
        """Copies of the pieces in host memory that is reused by the next save."""
        if [copy.shape for copy in self._copies] != [piece.content.shape for piece in pieces]:
            self._copies = [
                torch.empty(
                    piece.content.shape,
                    dtype=piece.content.dtype,
                    device="cpu",
                    pin_memory=piece.content.device.type != "cpu",
                )
                for piece in pieces
            ]
        for copy, piece in zip(self._copies, pieces, strict=True):
            copy.copy_(piece.content, non_blocking=True)
        for device in {piece.content.device for piece in pieces if piece.content.device.type != "cpu"}:
            torch.get_device_module(device).synchronize(device)
        return [replace(piece, content=copy) for piece, copy in zip(pieces, self._copies, strict=True)]


@dataclass
class _Writing:
    """One checkpoint while it is written."""

    directory: Path
    config: CheckpointConfig
    name: str
    rank: int = field(default_factory=dist.get_rank)
    world_size: int = field(default_factory=dist.get_world_size)
    is_written: threading.Event = field(default_factory=threading.Event)  # or failed, on this rank
    error: str | None = None
    best: str | None = None  # name of the checkpoint with the lowest validation loss, which may be this one
    give_up_at: float | None = None  # monotonic time after which to stop waiting for other ranks

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def final(self) -> Path:
        return self.directory / self.name

    @property
    def unfinished(self) -> Path:
        return self.directory / f"{self.name}.unfinished"

    @property
    def lists(self) -> Path:
        return self.unfinished / "written"

    def prepare(self) -> None:
        """Create the directory, and remove unfinished directories of earlier attempts."""
        if self.is_first:
            restore_replaced(self.directory)
            for left in self.directory.glob("step-*.unfinished"):
                shutil.rmtree(left)
            self.lists.mkdir(parents=True)
            (self.unfinished / "tensors").mkdir()

    def run(self, pieces: list[Piece], documents: dict[str, dict[str, Any]]) -> None:
        """Write and publish; the function of the thread."""
        try:
            self.write(pieces)
            self.is_written.set()
            if self.is_first:
                self._wait_for_lists()
            self.publish(documents)
        except Exception as error:  # reported at the next save
            self.error = _describe(error)
        finally:
            self.is_written.set()

    def raise_error(self, late: str | None) -> None:
        """Raise the error of the thread."""
        if self.error or late:
            raise CheckpointError(self.error or late)

    def write(self, pieces: list[Piece]) -> None:
        """Write the chunks of this rank and the list of them."""
        with ChunkWriter(self.unfinished / "tensors", self.rank) as writer:
            for piece in pieces:
                writer.add(piece)
        ChunkTable.of(writer.chunks).write(self.lists / f"{self.rank:05d}.index")

    def _wait_for_lists(self) -> None:
        while (found := len(list(self.lists.glob("*.index")))) < self.world_size:
            if self.give_up_at is not None and time.monotonic() > self.give_up_at:
                raise CheckpointError(f"{self.lists}: number of lists must be {self.world_size}, got {found}")
            time.sleep(0.05)

    def publish(self, documents: dict[str, dict[str, Any]]) -> None:
        """Join the lists of all ranks, rename the directory, remove checkpoints that are no longer kept."""
        if not self.is_first:
            return
        tensors = self.unfinished / "tensors"
        join_lists(self.lists, tensors, self.world_size)
        write_megatron_files(tensors)
        shutil.rmtree(self.lists)
        for name, document in documents.items():
            write_json(self.unfinished / name, document)
        seal(self.unfinished)
        replaced = self.directory / f"{self.name}{REPLACED}"
        if self.final.exists():  # until the next line the checkpoint has no name; restore_replaced returns it
            os.replace(self.final, replaced)
        os.replace(self.unfinished, self.final)
        sync(self.directory)
        try:
            if replaced.exists():
                shutil.rmtree(replaced)
            link_best(self.directory, self.best)
            for old in self._to_remove():
                _remove(old)
        except OSError as error:  # this checkpoint is complete; the next save tries again
            logger.warning("%s: saved, but an older checkpoint could not be removed (%s)", self.final, error)

    def _to_remove(self) -> list[Path]:
        found = complete_checkpoints(self.directory)
        end = found.index(self.final) + 1
        every = self.config.keep_every_steps
        older = found[: max(0, end - self.config.keep_last)]
        older = [path for path in older if every is None or int(path.name[5:]) % every]
        return [path for path in older if path.name != self.best] + found[end:]


def _describe(error: Exception) -> str:
    """The message of an error, with its type unless it is an error of the system, of torch (full disk) or of ours."""
    is_clear = isinstance(error, OSError | RuntimeError | CheckpointError) and str(error)
    return str(error)[:300] if is_clear else f"{type(error).__name__}: {str(error)[:300]}"


def _remove(checkpoint: Path) -> None:
    """Rename a checkpoint before its files are removed, so that a kill in between leaves no incomplete checkpoint."""
    dropped = checkpoint.with_name(f"{checkpoint.name}.dropped.unfinished")
    os.replace(checkpoint, dropped)
    shutil.rmtree(dropped)
