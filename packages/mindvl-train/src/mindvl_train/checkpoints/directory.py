# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run: their files, and finding them.

One directory per checkpoint, `step-00000100`: `manifest.json` (format, counters, configuration, layout, versions,
parents), `ledger.json` (position in the data), `tensors/` (weights and optimizer, torch's distributed format under
megatron-core's names) and `files.json` (sizes and checksums of all files). A directory is
complete when it has its final name; while being written (saving.py) its name ends in `.unfinished` and it is ignored.
restore.py loads a checkpoint.
"""

import dataclasses
import importlib.metadata
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindvl_train.checkpoints.integrity import find_damage, seal, write_json
from mindvl_train.errors import CheckpointError, DamagedCheckpointError
from mindvl_train.state import TrainState

FORMAT = 2
REPLACED = ".replaced.unfinished"  # suffix of a checkpoint while one of the same step takes its name
_COMPLETE = re.compile(r"step-(\d{8})")
_VERSIONS = ("mindvl-train", "mindvl-data", "mindvl-model", "mindvl-ops", "torch", "megatron-core", "transformers")


def save_weights(directory: Path, described: dict[str, Any], write: Callable[[Path], None]) -> Path:
    """Write a checkpoint of step 0 with weights only into a new directory, which the caller renames.

    Args:
        write: Writes the files of tensors/.
    """
    checkpoint = directory / "step-00000000"
    (checkpoint / "tensors").mkdir(parents=True)
    write(checkpoint / "tensors")
    counters = dict.fromkeys(("step", "tokens", "loss_tokens"), 0)
    write_json(checkpoint / "manifest.json", {"format": FORMAT, **counters, "versions": _versions(), **described})
    seal(checkpoint)
    return checkpoint


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:08d}"


def restore_replaced(directory: Path) -> None:
    """Return the name of a checkpoint to it, if a process was killed while it was replaced by one of the same step."""
    for path in directory.glob(f"step-*{REPLACED}"):
        final = path.with_name(path.name.removesuffix(REPLACED))
        if not final.exists():
            os.replace(path, final)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _COMPLETE.fullmatch(path.name))


def newest_first(directory: Path) -> list[Path]:
    """Complete checkpoints of a run, newest first, as rank 0 sees them; collective over all ranks."""
    found = [complete_checkpoints(directory)[::-1]]
    dist.broadcast_object_list(found)
    return found[0]


def read_manifest(checkpoint: Path, *, verify: bool = True) -> dict[str, Any]:
    """The manifest of a checkpoint, after a check that its files are intact; call this before reading anything else.

    Args:
        verify: Compare sizes and checksums of all files. False only if another process does so.

    Raises:
        DamagedCheckpointError: A file is missing or damaged.
        CheckpointError: The format is not supported, or an I/O error occurred.
    """
    manifest = read_json(checkpoint / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{checkpoint}: format {manifest.get('format')}, but this version reads {FORMAT}. "
            "Read it with the mindvl version named in its manifest.json."
        )
    try:
        damage = find_damage(checkpoint) if verify else None
    except OSError as error:  # I/O errors are not treated as corruption: no older checkpoint is used instead
        raise CheckpointError(
            f"{checkpoint}: I/O error while reading its files ({error}). Start again; if the error persists, use an older "
            "checkpoint."
        ) from error
    missing = [name for name in ("model", "run") if not isinstance(manifest.get(name), dict)]
    if damage is None and missing:
        damage = f"manifest.json has no section {missing[0]!r}"
    if damage is not None:
        raise DamagedCheckpointError(f"{checkpoint}: {damage}")
    return manifest


def newest_checkpoint(path: Path) -> Path:
    """The newest complete checkpoint of a run directory, or the path itself if it is a checkpoint or the link to one.

    Raises:
        CheckpointError: There is none.
    """
    if path.is_symlink() and _COMPLETE.fullmatch(path.resolve().name):  # the link `best`
        path = path.resolve()
    if path.name == "best" and not path.exists():
        raise CheckpointError(
            f"{path}: there is no best checkpoint yet, because no validation has finished, or checkpoints.keep_best is false. "
            "Use the run directory for its newest checkpoint."
        )
    if _COMPLETE.fullmatch(path.name):
        return path
    found = complete_checkpoints(path / "checkpoints")
    if not found:
        raise CheckpointError(
            f"{path}: contains no complete checkpoint. Use a run directory or one of its checkpoints."
        )
    return found[-1]


def plain_json(value: Any) -> Any:
    """Dataclasses, paths and tuples as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def manifest_of(state: TrainState, described: dict[str, Any], optimizer_steps: int) -> dict[str, Any]:
    """The manifest of a checkpoint of this state.

    Args:
        optimizer_steps: Number of optimizer updates; fewer than state.step if steps were skipped.
    """
    device = next(state.models[0].parameters()).device.type
    return {
        "format": FORMAT,
        "optimizer_steps": optimizer_steps,
        "world_size": dist.get_world_size(),
        "device": device,
        "versions": _versions(),
        **state.counters(),
        **described,
    }


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _VERSIONS}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a checkpoint.

    Raises:
        DamagedCheckpointError: The file is missing or damaged.
        CheckpointError: An I/O error occurred.
    """
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path}: file does not exist") from None
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path}: cannot be read ({error})") from error
    except OSError as error:
        raise CheckpointError(f"{path}: I/O error ({error}). Start again, or check the disk.") from error
    if not isinstance(document, dict):
        raise DamagedCheckpointError(f"{path}: is a JSON {type(document).__name__} instead of an object")
    return document
