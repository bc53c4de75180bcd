# SPDX-License-Identifier: Apache-2.0
"""A checkpoint into a run, or its weights alone: any layout, looked at for damage first.

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
from mindvl_train.checkpoints.directory import manifest_of, plain_json, read_json, read_manifest
from mindvl_train.errors import CheckpointError, DamagedCheckpointError
from mindvl_train.megatron.checkpoint import DAMAGE, set_optimizer_steps, wanted_pieces
from mindvl_train.megatron.tensor_files import ForeignTensorsError, StoredParameter, TensorReader
from mindvl_train.parallel_state import first_message
from mindvl_train.state import TrainState

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_NOT_LAYOUT = ("overlap",)  # of the section `parallel`: when things are sent, not what is computed where


def resume_first(
    found: Sequence[Path], state: TrainState, described: dict[str, Any], *, accept_data_change: str | None = None
) -> Path:
    """Resume from the first of these that is not damaged; each one passed over is a warning that names it.

    Raises:
        CheckpointError: All are damaged, or the first whole one is of another model or phase.
    """
    for checkpoint, older in itertools.pairwise(found):
        try:
            resume(checkpoint, state, described, accept_data_change=accept_data_change)
        except DamagedCheckpointError as error:
            logger.warning("DAMAGED: %s. Going back to %s.", error.damage, older.name)
        else:
            return checkpoint
    resume(found[-1], state, described, accept_data_change=accept_data_change)
    return found[-1]


def resume(
    checkpoint: Path, state: TrainState, described: dict[str, Any], *, accept_data_change: str | None = None
) -> None:
    """Restore everything, so that the next step is the one that would have followed; called by every process.

    Args:
        accept_data_change: Who accepts that sources changed, came or went since the checkpoint was written.

    Raises:
        DamagedCheckpointError: The checkpoint is not as it was written.
        CheckpointError: It is of another model or phase.
    """
    manifest, ledger = _on_all(lambda: (_read_whole(checkpoint), read_json(checkpoint / "ledger.json")))
    _check_origin(checkpoint, manifest, described)
    _load(checkpoint, state.models, state.optimizer)
    set_optimizer_steps(state.optimizer, manifest["optimizer_steps"])
    _take_up_data(state, ledger, accept_data_change, _audit_log_of(checkpoint, manifest))
    state.restore(manifest)
    differing = sorted(_changed(_circumstances(manifest), _circumstances(manifest_of(state, described, 0))))
    if differing:
        logger.info("the same data follows; numbers agree to rounding only (%s)", ", ".join(differing))
    else:
        logger.info("the layout is that of %s: what follows is what would have followed, bit for bit", checkpoint.name)


def _check_origin(checkpoint: Path, manifest: dict[str, Any], described: dict[str, Any]) -> None:
    # through our dataclasses, so that a field newer than the checkpoint counts with its default
    saved = plain_json(config_from_json(manifest["model"]))
    if saved != described["model"]:
        differing = sorted(
            f"{part}.{name}"
            for part in ("vision", "language", "tokens")
            for name in saved[part].keys() | described["model"][part].keys()
            if saved[part].get(name) != described["model"][part].get(name)
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


def load_weights(checkpoint: Path, model: torch.nn.Module) -> None:
    """Take only the weights of a checkpoint, as the hand-over between phases does; called by every process.

    Raises:
        CheckpointError: The checkpoint is damaged, or of another model.
    """
    _on_all(lambda: _read_whole(checkpoint))
    _load(checkpoint, [model], None)


class WeightReader:
    """Single parameters of a checkpoint of any layout, for those who do not want all at once.

    Raises:
        CheckpointError: The checkpoint is damaged, or of another model.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        with _reading(checkpoint, "its list of tensors"):
            self._tensors = TensorReader(checkpoint / "tensors")

    def read(self, param_name: str, place: StoredParameter) -> Tensor:
        """A whole parameter."""
        with _reading(self._checkpoint, param_name):
            return self._tensors.read(place)


@contextmanager
def _reading(checkpoint: Path, what: str) -> Iterator[None]:
    """Say of an error what it means for the checkpoint: another model, damage, or a disk that does not answer."""
    try:
        yield
    except ForeignTensorsError as error:
        raise CheckpointError(
            f"{checkpoint}: is of another model ({error}). Name a checkpoint of this model, or the model it is of."
        ) from error
    except torch.OutOfMemoryError:
        raise
    except DAMAGE as error:
        raise DamagedCheckpointError(
            f"{checkpoint}: {what} cannot be read ({type(error).__name__}: {str(error)[:300]})"
        ) from error
    except OSError as error:  # nothing is known to be wrong with the checkpoint, so no older one takes its place
        raise CheckpointError(
            f"{checkpoint}: {what} cannot be read now ({error}). Start again; if it stays so, name an older checkpoint "
            "with --resume PATH."
        ) from error


def _circumstances(manifest: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for equal bits."""
    parallel = manifest["run"].get("parallel", {})
    layout = {name: value for name, value in parallel.items() if name not in _NOT_LAYOUT}
    return {**layout, **{name: manifest.get(name) for name in ("world_size", "device", "versions")}}


def _on_all(action: Callable[[], Result]) -> Result:
    """The same on every process; what one of them meets is an error on all, so that all go on or back together."""
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


def _read_whole(checkpoint: Path) -> dict[str, Any]:
    """The manifest; of a thousand processes one compares the files, of which there may be a thousand."""
    return read_manifest(checkpoint, verify=dist.get_rank() == 0)


def _load(checkpoint: Path, models: Sequence[torch.nn.Module], optimizer: Any | None) -> None:
    pieces = wanted_pieces(models, optimizer)

    def read() -> None:
        with _reading(checkpoint, "its tensors"):
            TensorReader(checkpoint / "tensors").fill(pieces)

    _on_all(read)


def _audit_log_of(checkpoint: Path, manifest: dict[str, Any]) -> Path:
    """Where the run that saved a checkpoint logged its steps."""
    named = manifest["run"].get("data", {}).get("audit_log")
    return checkpoint.parent.parent / "audit.jsonl" if named is None else Path(named)


def _take_up_data(state: TrainState, ledger: dict[str, Any], accept_change: str | None, parent_log: Path) -> None:
    """The position in the data; when one process cannot go on there, none does."""
    error: Exception | None = None
    try:
        state.source.load_state_dict(ledger, accept_change=accept_change, parent_log=parent_log)
    except Exception as problem:  # of whatever package the data is
        error = problem
    said = first_message(None if error is None else str(error))
    if error is not None:
        raise error
    if said is not None:
        raise CheckpointError(said)


def _changed(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Dotted names of the values that differ, with both."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before.keys() | now.keys():
            yield from _changed(before.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif before != now:
        yield f"{path} {before} -> {now}"
