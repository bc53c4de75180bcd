# SPDX-License-Identifier: Apache-2.0
"""Tensors of model and optimizer to and from megatron-core's distributed checkpoint format."""

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling

# Optimizer state in whole tensors: the form that loads under another number of processes (0.16.1's default raises).
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}

# What reading damaged or foreign tensors raises, by the layer that notices.
LOAD_ERRORS = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    KeyError,
    pickle.UnpicklingError,
    CheckpointingException,
    torch_checkpoint.CheckpointException,
)


def save_tensors(folder: Path, model: torch.nn.Module, optimizer: Any) -> None:
    """Write the shards of this process into an existing folder."""
    state = _state(model, optimizer, is_loading=False)
    dist_checkpointing.save(state, str(folder), SaveInProcess("torch_dist", 1), content_metadata=SHARDING)


class SaveInProcess(TorchDistSaveShardedStrategy):
    """The same format, written by this process.

    megatron's own writer starts a manager process, which outlives a killed parent, and forks writers beside the threads
    of the loader.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write this rank's shards."""
        keyed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(keyed, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def load_tensors(folder: Path, model: torch.nn.Module, optimizer: Any | None) -> None:
    """Fill a wrapped model, and its optimizer where one is given, from a folder of save_tensors."""
    state = dist_checkpointing.load(
        _state(model, optimizer, is_loading=True), str(folder), strict=StrictHandling.ASSUME_OK_UNEXPECTED
    )
    unwrap(model).load_state_dict(state["model"])
    if optimizer is not None:
        with torch.no_grad():
            optimizer.load_state_dict(state["optimizer"])


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The MindVLModel inside gradient buffers and precision wrappers."""
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    return model


def _state(model: torch.nn.Module, optimizer: Any | None, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        **SHARDING,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    inner: Any = unwrap(model)
    state = {"model": inner.sharded_state_dict(metadata=metadata)}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state
