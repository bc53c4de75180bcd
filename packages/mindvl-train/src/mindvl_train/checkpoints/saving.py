# SPDX-License-Identifier: Apache-2.0
"""Checkpoints saved whole or not at all, in the foreground or beside training.

Comes after a step; directory.py finds and restore.py loads what is saved here. Every process writes its own boxes of the
tensors and a list of them; when all lists are there, the first process joins them and gives the directory its name. In
the background a thread does so from a copy in host memory. It uses no collective, which could meet one of training;
whether it failed is agreed upon when the next checkpoint begins, or at the end.
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

from mindvl_train.checkpoints.directory import complete_checkpoints, manifest_of
from mindvl_train.checkpoints.integrity import seal, sync, write_json
from mindvl_train.config import CheckpointConfig
from mindvl_train.errors import CheckpointError
from mindvl_train.megatron.checkpoint import Piece, optimizer_steps, owned_pieces
from mindvl_train.megatron.tensor_files import ChunkWriter
from mindvl_train.megatron.tensor_index import read_list, write_index, write_list
from mindvl_train.parallel_state import first_message
from mindvl_train.state import TrainState

logger = logging.getLogger(__name__)

# How long training waits for files that are being written before it gives up, and a run that ends with an error for
# those of other processes, which may be gone.
PATIENCE_S = 1500.0
_LAST_PATIENCE_S = 60.0
Result = TypeVar("Result")


class Saver:
    """Saves a run's checkpoints under one directory. Every process has one and calls it at the same points.

    At the end of its with block the last checkpoint is complete.

    Args:
        described: What manifests say of the run: configuration and parents, plain JSON values.
    """

    def __init__(self, directory: Path, config: CheckpointConfig, described: dict[str, Any]) -> None:
        self.stall_s = 0.0  # how long the last save kept training waiting
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
        """Save the state; drop older checkpoints than are to be kept, and later ones.

        Later ones exist only when the run went back to an older checkpoint: they are of the branch it left.

        Returns:
            The checkpoint's name. In the background it is there only after the next `finish` or `save`.

        Raises:
            CheckpointError: This checkpoint, or the one before in the background, could not be written by some process.
                Nothing of it is left, and older ones are as they were.
        """
        began = time.monotonic()
        self.finish()
        writing = _Writing(self._directory, self._config, f"step-{state.step:08d}")
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
            done = "is being written" if self._config.async_save else "is saved"
            logger.info("%s %s; training waited %.2f s", writing.name, done, self.stall_s)
        return writing.final

    @property
    def failed(self) -> bool:
        """Whether a checkpoint in the background failed on this process; the next `finish` says so on all."""
        return self._writing is not None and self._writing.error is not None

    def finish(self) -> None:
        """Wait for the checkpoint in the background, if there is one.

        Raises:
            CheckpointError: As save.
        """
        writing, thread = self._writing, self._thread
        if writing is None or thread is None:
            return
        # First the writers, so that the first process does not wait for the list of one that failed.
        writing.is_written.wait(PATIENCE_S)
        late = None if writing.is_written.is_set() else f"its files are not written after {PATIENCE_S:.0f} s"
        try:
            self._agree(lambda: writing.say_error(late))
            thread.join(PATIENCE_S)
            self._agree(lambda: writing.say_error(f"no end after {PATIENCE_S:.0f} s" if thread.is_alive() else None))
        finally:
            self._writing = self._thread = None

    def _close(self) -> None:
        """When the run ends with an error: let the checkpoint in the background end, alone and not for long."""
        if self._thread is not None and self._writing is not None:
            self._writing.give_up_at = time.monotonic() + _LAST_PATIENCE_S
            self._thread.join(_LAST_PATIENCE_S + 1)

    def _agree(self, action: Callable[[], Result]) -> Result:
        """Do something on every process, and raise on all when it failed on one, whatever it was."""
        assert self._writing is not None
        error: str | None = None
        try:
            result = action()
        except Exception as problem:  # the others would wait for this process for ever
            error = _words(problem)
        said = first_message(error)
        if said is None:
            return result
        writing, self._writing = self._writing, None
        writing.give_up_at = 0.0
        if self._thread is not None:
            self._thread.join(PATIENCE_S)
            self._thread = None
        if writing.is_first:
            shutil.rmtree(writing.unfinished, ignore_errors=True)
        kept = complete_checkpoints(self._directory)
        raise CheckpointError(
            f"{writing.final}: could not be saved ({said}). Look at the disk's free space; "
            + (f"the run can go on from {kept[-1].name}." if kept else "there is no older checkpoint.")
        )

    def _contents(self, state: TrainState) -> tuple[list[Piece], dict[str, dict[str, Any]]]:
        """This process's part of the tensors, and what is written once."""
        pieces = owned_pieces(state.models, state.optimizer)
        documents = {
            "ledger.json": state.source.state_dict(),
            "manifest.json": manifest_of(state, self._described, optimizer_steps(state.optimizer)),
        }
        return self._copied(pieces) if self._config.async_save else pieces, documents

    def _copied(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces in host memory of our own, which is kept for the next time."""
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
    is_written: threading.Event = field(default_factory=threading.Event)  # or failed, by this process
    error: str | None = None
    give_up_at: float | None = None  # on the monotonic clock: no longer wait for other processes

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
        """Make the directory; what an attempt before left is not mistaken for ours."""
        if self.is_first:
            for left in self.directory.glob("step-*.unfinished"):
                shutil.rmtree(left)
            self.lists.mkdir(parents=True)
            (self.unfinished / "tensors").mkdir()

    def run(self, pieces: list[Piece], documents: dict[str, dict[str, Any]]) -> None:
        """Write and publish; the whole life of the thread."""
        try:
            self.write(pieces)
            self.is_written.set()
            if self.is_first:
                self._wait_for_lists()
            self.publish(documents)
        except Exception as error:  # whatever it is, training must hear of it
            self.error = _words(error)
        finally:
            self.is_written.set()

    def say_error(self, late: str | None) -> None:
        """Raise what went wrong in the thread."""
        if self.error or late:
            raise CheckpointError(self.error or late)

    def write(self, pieces: list[Piece]) -> None:
        """The boxes of this process, and the list of them."""
        with ChunkWriter(self.unfinished / "tensors", self.rank) as writer:
            for piece in pieces:
                writer.add(piece)
        write_list(self.lists / f"{self.rank:05d}.json", writer.chunks)

    def _wait_for_lists(self) -> None:
        while len(list(self.lists.glob("*.json"))) < self.world_size:
            if self.give_up_at is not None and time.monotonic() > self.give_up_at:
                raise CheckpointError("another process did not write its part")
            time.sleep(0.05)

    def publish(self, documents: dict[str, dict[str, Any]]) -> None:
        """When all lists are there: join them, name the directory, drop what is no longer kept."""
        if not self.is_first:
            return
        lists = [read_list(self.lists / f"{rank:05d}.json") for rank in range(self.world_size)]
        write_index(self.unfinished / "tensors", [chunk for chunks in lists for chunk in chunks])
        shutil.rmtree(self.lists)
        for name, document in documents.items():
            write_json(self.unfinished / name, document)
        seal(self.unfinished)
        if self.final.exists():
            _drop(self.final)
        os.replace(self.unfinished, self.final)
        sync(self.directory)
        try:
            for left in self._to_drop():
                _drop(left)
        except OSError as error:  # this checkpoint is safe, and the next one tries again
            logger.warning("%s is saved, but an older checkpoint could not be removed (%s)", self.final, error)

    def _to_drop(self) -> list[Path]:
        found = complete_checkpoints(self.directory)
        place = found.index(self.final) + 1
        every = self.config.keep_every_steps
        older = found[: max(0, place - self.config.keep_last)]
        return [path for path in older if every is None or int(path.name[5:]) % every] + found[place:]


def _words(error: Exception) -> str:
    """What went wrong; the type too, unless the words come from the system, from torch (of a full disk) or from us."""
    speaks_for_itself = isinstance(error, OSError | RuntimeError | CheckpointError) and str(error)
    return str(error)[:300] if speaks_for_itself else f"{type(error).__name__}: {str(error)[:300]}"


def _drop(checkpoint: Path) -> None:
    """Take its name away before its files, so that a kill in between leaves nothing that looks complete."""
    dropped = checkpoint.with_name(f"{checkpoint.name}.dropped.unfinished")
    os.replace(checkpoint, dropped)
    shutil.rmtree(dropped)
