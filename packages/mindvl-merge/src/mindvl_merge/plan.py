# SPDX-License-Identifier: Apache-2.0
"""Compare the folders of a merge before anything is written, and say for each tensor whether it is merged or copied."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .config import MergeConfig
from .errors import FolderError, MergeError
from .folder import ModelFolder, TensorInfo


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """One tensor of the result."""

    info: TensorInfo  # name, shape and type in the result
    is_merged: bool  # False: copied from the first model


def make_plan(config: MergeConfig, folders: Sequence[ModelFolder]) -> list[TensorPlan]:
    """Tensors of the result in the order of the first folder.

    Raises:
        MergeError: A path clashes, the folders hold different tensors, or `only` names none.
    """
    first = folders[0]
    for other in folders[1:]:
        _match(first, other, any_float=config.dtype is not None)
    for prefix in config.only:
        if not any(name.startswith(prefix) for name in first.tensors):
            some = ", ".join(sorted({name.split(".")[0] + "." for name in first.tensors})[:8])
            raise MergeError(f"no tensor begins with {prefix!r}. only, {first.path}. Names begin with: {some}")
    return [_plan_tensor(config, info) for info in first.tensors.values()]


def check_paths(config: MergeConfig) -> None:
    """Refuse an output that would destroy an input or something else."""
    out = config.out.resolve()
    for model in config.models:
        source = model.resolve()
        if out == source or out in source.parents or source in out.parents:
            raise MergeError(f"the output lies on the input {model}. out: {config.out}. Choose another folder.")
    if out.exists() and not config.overwrite:
        raise MergeError(
            f"the output exists. out: {config.out}. Remove it, choose another, or pass --force (overwrite)."
        )
    if out.exists() and not out.is_dir():
        raise MergeError(f"the output is a file. out: {config.out}. Choose a folder.")


def _plan_tensor(config: MergeConfig, info: TensorInfo) -> TensorPlan:
    chosen = not config.only or info.name.startswith(config.only)
    if config.dtype is not None and info.dtype.is_floating_point:
        info = replace(info, dtype=getattr(torch, config.dtype))
    return TensorPlan(info=info, is_merged=chosen and info.dtype.is_floating_point)


def _match(first: ModelFolder, other: ModelFolder, *, any_float: bool) -> None:
    missing = sorted(first.tensors.keys() - other.tensors.keys())
    extra = sorted(other.tensors.keys() - first.tensors.keys())
    if missing or extra:
        name, where, lacks = (missing[0], first.path, other.path) if missing else (extra[0], other.path, first.path)
        raise FolderError(
            f"{len(missing) + len(extra)} tensors are in one model only, first {name} of {where}. {lacks}. "
            "Merge models of one architecture."
        )
    for name, left in first.tensors.items():
        right = other.tensors[name]
        if left.shape != right.shape:
            raise FolderError(
                f"shapes {list(left.shape)} and {list(right.shape)} differ. {_place(other.path, right)}. "
                f"Merge models of one size; the first is {first.path}."
            )
        both_float = left.dtype.is_floating_point and right.dtype.is_floating_point
        if left.dtype != right.dtype and not (any_float and both_float):
            raise FolderError(
                f"types {left.dtype} and {right.dtype} differ. {_place(other.path, right)}. Name the type "
                f"of the result (dtype) to mix them; the first is {first.path}."
            )


def _place(path: Path, info: TensorInfo) -> str:
    return f"{path / info.file}: {info.name}"
