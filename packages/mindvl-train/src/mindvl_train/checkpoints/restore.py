# SPDX-License-Identifier: Apache-2.0
"""Load a checkpoint, or only its weights, into any parallel layout, after a check for damage.

Comes after the model is built and before the first step; directory.py finds what is read here.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mindvl_model import config_from_json
from mindvl_model.megatron.share import global_name
from mindvl_model.parameters import named_tensors
from mindvl_train.adapters import adapter_of
from mindvl_train.checkpoints.directory import manifest_of, plain_json, read_json, read_manifest
from mindvl_train.errors import CheckpointError, DamagedCheckpointError
from mindvl_train.megatron.checkpoint import DAMAGE, set_optimizer_steps, unset_tensors, wanted_pieces
from mindvl_train.megatron.tensor_files import ForeignTensorsError, StoredParameter, TensorReader
from mindvl_train.parallel_state import first_message
from mindvl_train.state import TrainState

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_WITHOUT_EFFECT = ("overlap",)  # fields of `parallel` that do not affect results


def resume_first(
    found: Sequence[Path], state: TrainState, described: dict[str, Any], *, accept_data_change: str | None = None
) -> Path:
    """Resume from the first intact checkpoint; damaged ones are logged as warnings.

    Raises:
        CheckpointError: All are damaged, or the first intact one is of another model or phase.
    """
    for checkpoint, older in itertools.pairwise(found):
        try:
            resume(checkpoint, state, described, accept_data_change=accept_data_change)
        except DamagedCheckpointError as error:
            logger.warning("DAMAGED: %s. Trying %s.", error.damage, older.name)
        else:
            return checkpoint
    resume(found[-1], state, described, accept_data_change=accept_data_change)
    return found[-1]


def resume(
    checkpoint: Path, state: TrainState, described: dict[str, Any], *, accept_data_change: str | None = None
) -> None:
    """Restore model, optimizer, data position and counters; collective over all ranks.

    Args:
        accept_data_change: User who accepts that sources were changed, added or removed since the checkpoint.

    Raises:
        DamagedCheckpointError: The checkpoint is damaged.
        CheckpointError: It is of another model or phase.
    """
    manifest, ledger = _on_all_ranks(lambda: (_verified_manifest(checkpoint), read_json(checkpoint / "ledger.json")))
    _check_origin(checkpoint, manifest, described)
    _load(checkpoint, state.models, state.optimizer)
    set_optimizer_steps(state.optimizer, manifest["optimizer_steps"])
    _restore_data(state, checkpoint / "ledger.json", ledger, accept_data_change, _audit_log_of(checkpoint, manifest))
    state.restore(manifest)
    differing = sorted(_changed(_environment_of(manifest), _environment_of(manifest_of(state, described, 0))))
    if differing:
        logger.info(
            "the run continues with the same data order; results are equal up to rounding (%s)", ", ".join(differing)
        )
    else:
        logger.info("same parallel layout as %s: the run continues bitwise identically", checkpoint.name)


def _check_origin(checkpoint: Path, manifest: dict[str, Any], described: dict[str, Any]) -> None:
    # Through the dataclasses, so that fields added since the checkpoint have their defaults.
    saved = plain_json(config_from_json(manifest["model"]))
    if saved != described["model"]:
        differing = sorted(
            f"{part}.{name}"
            for part in ("vision", "language", "tokens")
            for name in saved[part].keys() | described["model"][part].keys()
            if saved[part].get(name) != described["model"][part].get(name)
        )
        raise CheckpointError(
            f"{checkpoint}: was saved for another model ({', '.join(differing)} differ). "
            "Resume with the recipe of that run, or set another `out`."
        )
    for name in ("phase", "trainable", "adapter", "precision"):
        before, now = manifest["run"].get(name), described["run"].get(name)
        if name == "adapter" and before is not None:
            before = plain_json(adapter_of(manifest)[0])
        if before != now:
            raise CheckpointError(
                f"{checkpoint}: was saved by a run with {name}={before}, but this run has {name}={now}. "
                "Set another `out`, and load these weights with init.checkpoint."
            )
    _check_base(checkpoint, manifest.get("base"), described.get("base"))
    changed = sorted(_changed(manifest["run"], described["run"]))
    if changed:
        logger.warning("settings changed since %s: %s", checkpoint.name, ", ".join(changed))


def _check_base(checkpoint: Path, saved: dict[str, Any] | None, now: dict[str, Any] | None) -> None:
    """Check that the weights below saved adapters are those of this run."""
    if saved is None or now is None:
        return
    for name in sorted(saved["weights"].keys() | now["weights"].keys()):
        before, after = saved["weights"].get(name), now["weights"].get(name)
        if before is None or after is None or before["digest"] != after["digest"]:
            was, is_now = (
                "none" if one is None else f"{one['path']} (digest {one['digest'][:12]})" for one in (before, after)
            )
            raise CheckpointError(
                f"{checkpoint}: its adapters were trained on init.{name}={was}, but this run has {is_now}. Restore these "
                "weights, or set another `out`."
            )
    if not {"model", "checkpoint"} & now["weights"].keys() and saved["seed"] != now["seed"]:
        raise CheckpointError(
            f"{checkpoint}: its adapters were trained on random weights of seed={saved['seed']}, but this run has "
            f"seed={now['seed']}. Set seed={saved['seed']}, or another `out`."
        )


def load_weights(checkpoint: Path, model: torch.nn.Module) -> set[str]:
    """Load only the weights of a checkpoint, as at the start of a later phase; collective over all ranks.

    Returns:
        The global names of the loaded tensors, which are all of the model.

    Raises:
        CheckpointError: The checkpoint is damaged, or of another model.
    """
    manifest = _on_all_ranks(lambda: _verified_manifest(checkpoint))
    if manifest["run"].get("adapter") is not None:
        raise CheckpointError(
            f"{checkpoint}: stores adapters without the weights below them. Convert it with mindvl convert, then set "
            "init.adapter to the result, or fold it into its base with --merge-adapter and set init.model."
        )
    _load(checkpoint, [model], None)
    return {global_name(model, name) for name in named_tensors(model)}


class WeightReader:
    """Reads single parameters of a checkpoint, saved in any parallel layout.

    Raises:
        CheckpointError: The checkpoint is damaged, or of another model.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        with _reading(checkpoint, "the index of its tensors"):
            self._tensors = TensorReader(checkpoint / "tensors")

    def read(self, param_name: str, stored: StoredParameter) -> Tensor:
        """Read a whole parameter."""
        with _reading(self._checkpoint, param_name):
            return self._tensors.read(stored)


@contextmanager
def _reading(checkpoint: Path, what: str) -> Iterator[None]:
    """Convert errors of a read: another model, a damaged checkpoint, or an I/O error."""
    try:
        yield
    except ForeignTensorsError as error:
        raise CheckpointError(
            f"{checkpoint}: is of another model ({error}). Use a checkpoint of this model, or change the model section."
        ) from error
    except torch.OutOfMemoryError:
        raise
    except DAMAGE as error:
        raise DamagedCheckpointError(
            f"{checkpoint}: {what} cannot be read ({type(error).__name__}: {str(error)[:300]})"
        ) from error
    except OSError as error:  # I/O errors are not treated as corruption: no older checkpoint is used instead
        raise CheckpointError(
            f"{checkpoint}: I/O error while reading {what} ({error}). Start again; if the error persists, use an older "
            "checkpoint with --resume PATH."
        ) from error


def _environment_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """Values that must be equal for bitwise identical results."""
    parallel = manifest["run"].get("parallel", {})
    layout = {name: value for name, value in parallel.items() if name not in _WITHOUT_EFFECT}
    return {**layout, **{name: manifest.get(name) for name in ("world_size", "device", "versions")}}


def _on_all_ranks(action: Callable[[], Result]) -> Result:
    """Run an action on every rank; an error on one rank is raised on all."""
    damage = other = None
    try:
        result = action()
    except DamagedCheckpointError as problem:
        damage = problem.damage
    except CheckpointError as problem:
        other = str(problem)
    damage, other = first_message(damage), first_message(other)
    if other is not None:
        raise CheckpointError(other)
    if damage is not None:
        raise DamagedCheckpointError(damage)
    return result


def _verified_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest; only rank 0 compares the files."""
    return read_manifest(checkpoint, verify=dist.get_rank() == 0)


def _load(checkpoint: Path, models: Sequence[torch.nn.Module], optimizer: Any | None) -> None:
    pieces = wanted_pieces(models, optimizer)

    def read() -> None:
        unset = [name for model in models for name in unset_tensors(model)]
        if unset:
            raise CheckpointError(
                f"{checkpoint}: stores no value for {len(unset)} tensors of the model, such as {unset[0]}, which would "
                "have random content. Return them from sharded_state_dict of their module."
            )
        with _reading(checkpoint, "its tensors"):
            TensorReader(checkpoint / "tensors").fill(pieces)

    _on_all_ranks(read)


def _audit_log_of(checkpoint: Path, manifest: dict[str, Any]) -> Path:
    """The audit log of the run that saved a checkpoint."""
    named = manifest["run"].get("data", {}).get("audit_log")
    return checkpoint.parent.parent / "audit.jsonl" if named is None else Path(named)


def _restore_data(
    state: TrainState, file: Path, ledger: dict[str, Any], accept_change: str | None, parent_log: Path
) -> None:
    """Restore the position in the data; if one rank fails, all raise."""
    error: Exception | None = None
    try:
        state.source.load_state_dict(ledger, accept_change=accept_change, parent_log=parent_log, where=str(file))
    except Exception as problem:  # any error of the data package
        error = problem
    message = first_message(None if error is None else str(error))
    if error is not None:
        raise error
    if message is not None:
        raise CheckpointError(message)


def _changed(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Dotted names of differing values, with both values; elements of a list that have a `name` are found by it."""
    before, now = _by_name(before), _by_name(now)
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before.keys() | now.keys():
            yield from _changed(before.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif before != now:
        yield f"{path} {before} -> {now}"


def _by_name(value: Any) -> Any:
    """A list of mappings with names, such as the sources, as one mapping; another value as it is."""
    if isinstance(value, list) and value and all(isinstance(entry, dict) and "name" in entry for entry in value):
        return {entry["name"]: entry for entry in value}
    return value
