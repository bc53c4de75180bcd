# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saved whole or not at all, found again, pruned.

One folder per checkpoint, `step-00000100`: `manifest.json` (format, counters, configuration, versions, parents),
`ledger.json` (position in the data) and `tensors/` (megatron-core's distributed format). A folder is complete when it
has its final name; while being written it ends in `.unfinished` and is never chosen.
"""

import dataclasses
import importlib.metadata
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindvl_train.errors import CheckpointError
from mindvl_train.megatron.checkpoint import LOAD_ERRORS, load_tensors, save_tensors
from mindvl_train.megatron.tensor_files import Place, TensorReader
from mindvl_train.state import TrainState

logger = logging.getLogger(__name__)

FORMAT = 1
_COMPLETE = re.compile(r"step-(\d{8})")
_VERSIONS = ("mindvl-train", "mindvl-data", "mindvl-model", "mindvl-ops", "torch", "megatron-core", "transformers")


def save(folder: Path, state: TrainState, described: dict[str, Any], keep_last: int) -> Path:
    """Save the state under folder, drop the oldest beyond keep_last and all later ones; called by every rank.

    Later ones exist only when the run went back to an older checkpoint: they are of the branch it left.

    Args:
        described: What the manifest says of the run: configuration and parents, plain JSON values.
    """
    final = folder / f"step-{state.step:08d}"
    unfinished = folder / f"{final.name}.unfinished"
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(unfinished, ignore_errors=True)
        (unfinished / "tensors").mkdir(parents=True)
    dist.barrier()
    save_tensors(unfinished / "tensors", state.models[0], state.optimizer)
    dist.barrier()
    if first:
        _write_json(unfinished / "ledger.json", state.source.state_dict())
        _write_json(unfinished / "manifest.json", _manifest(state, described))
        _sync_tree(unfinished)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(unfinished, final)
        _sync(folder)
        found = complete(folder)
        place = found.index(final) + 1
        for left in found[: max(0, place - keep_last)] + found[place:]:
            shutil.rmtree(left)
    dist.barrier()
    return final


def save_weights(folder: Path, described: dict[str, Any], write: Callable[[Path], None]) -> Path:
    """A checkpoint of weights alone, before the first step, in a new folder that the caller publishes.

    Args:
        write: Fills tensors/.
    """
    checkpoint = folder / "step-00000000"
    (checkpoint / "tensors").mkdir(parents=True)
    write(checkpoint / "tensors")
    counters = dict.fromkeys(("step", "tokens", "label_tokens"), 0)
    _write_json(checkpoint / "manifest.json", {"format": FORMAT, **counters, "versions": _versions(), **described})
    _sync_tree(folder.parent)
    return checkpoint


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _COMPLETE.fullmatch(path.name))


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: There is none, or it is of a format this version does not read.
    """
    manifest = _read_json(checkpoint / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{checkpoint}: format {manifest.get('format')}, but this version reads {FORMAT}. "
            "Read it with the mindvl version named in its manifest.json."
        )
    return manifest


def resume(
    checkpoint: Path, state: TrainState, described: dict[str, Any], *, accept_data_change: str | None = None
) -> None:
    """Restore everything, so that the next step is the one that would have followed.

    Args:
        accept_data_change: Who accepts that sources changed, came or went since the checkpoint was written.

    Raises:
        CheckpointError: The checkpoint is of another model or phase, or damaged.
    """
    manifest = read_manifest(checkpoint)
    if manifest["model"] != described["model"]:
        differing = sorted(
            f"{part}.{name}"
            for part in ("vision", "language", "tokens")
            for name in manifest["model"][part].keys() | described["model"][part].keys()
            if manifest["model"][part].get(name) != described["model"][part].get(name)
        )
        raise CheckpointError(
            f"{checkpoint}: saved for another model ({', '.join(differing)} differ). "
            "Resume with the recipe it was made with, or name another `out`."
        )
    for name in ("phase", "trainable", "precision"):
        before, now = manifest["run"].get(name), described["run"].get(name)
        if before != now:
            raise CheckpointError(
                f"{checkpoint}: saved by a run with {name}={before}, but this one has {now}. "
                "Name another `out`, and start from these weights by init.checkpoint."
            )
    changed = sorted(_changed(manifest["run"], described["run"]))
    if changed:
        logger.warning("going on with other settings than %s was saved with: %s", checkpoint.name, ", ".join(changed))
    _load_tensors(checkpoint, state.models[0], state.optimizer)
    state.source.load_state_dict(_read_json(checkpoint / "ledger.json"), accept_change=accept_data_change)
    state.step, state.tokens, state.label_tokens = (manifest[name] for name in ("step", "tokens", "label_tokens"))


def load_weights(checkpoint: Path, model: torch.nn.Module) -> None:
    """Take only the weights of a checkpoint, as the hand-over between phases does.

    Raises:
        CheckpointError: The checkpoint is damaged, or of another model.
    """
    read_manifest(checkpoint)
    _load_tensors(checkpoint, model, None)


class WeightReader:
    """Single parameters of a checkpoint of any layout, for those who do not want all at once.

    Raises:
        CheckpointError: The checkpoint is damaged, or of another model.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        with self._located("its list of tensors"):
            self._tensors = TensorReader(checkpoint / "tensors")

    def read(self, param_name: str, place: Place) -> Tensor:
        """A whole parameter."""
        with self._located(param_name):
            return self._tensors.read(place)

    @contextmanager
    def _located(self, what: str) -> Iterator[None]:
        try:
            yield
        except LOAD_ERRORS as error:
            raise CheckpointError(
                f"{self._checkpoint}: {what} cannot be read ({type(error).__name__}: {str(error)[:300]}). "
                "Name another checkpoint."
            ) from error


def newest(path: Path) -> Path:
    """The newest complete checkpoint of a run folder, or the path itself when it is one.

    Raises:
        CheckpointError: There is none.
    """
    if _COMPLETE.fullmatch(path.name):
        return path
    found = complete(path / "checkpoints")
    if not found:
        raise CheckpointError(f"{path}: no complete checkpoint here. Name a run folder or one of its checkpoints.")
    return found[-1]


def plain(value: Any) -> Any:
    """Dataclasses, paths and tuples as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _load_tensors(checkpoint: Path, model: torch.nn.Module, optimizer: Any | None) -> None:
    try:
        load_tensors(checkpoint / "tensors", model, optimizer)
    except LOAD_ERRORS as error:
        raise CheckpointError(
            f"{checkpoint}: its tensors cannot be read ({type(error).__name__}: {str(error)[:300]}). "
            "Name an older checkpoint with --resume PATH."
        ) from error


def _changed(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Dotted names of the values that differ, with both."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before.keys() | now.keys():
            yield from _changed(before.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif before != now:
        yield f"{path} {before} -> {now}"


def _manifest(state: TrainState, described: dict[str, Any]) -> dict[str, Any]:
    counters = {"step": state.step, "tokens": state.tokens, "label_tokens": state.label_tokens}
    return {"format": FORMAT, **counters, "versions": _versions(), **described}


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _VERSIONS}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file. Name a complete checkpoint folder.") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged ({error}). Name an older checkpoint with --resume PATH.") from error


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
