# SPDX-License-Identifier: Apache-2.0
"""Which tensors a merge writes, in which order, and whether each is merged or copied; and where it may write them.

Comes after the parents were compared (parents.py), before run.py writes.
"""

from dataclasses import dataclass, replace

import torch

from .config import MergeConfig
from .directory import INDEX_NAME, SINGLE_NAME, ModelDirectory
from .errors import MergeError
from .files import real_path
from .headers import TensorInfo

MANIFEST_NAME = "merge.json"


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """One tensor of the result."""

    info: TensorInfo  # name, shape and type in the result
    is_merged: bool  # False: copied from the first model


def make_plan(config: MergeConfig, first: ModelDirectory) -> list[TensorPlan]:
    """Tensors of the result in the order of the first model.

    Raises:
        MergeError: A prefix in `only` names no tensor.
    """
    for prefix in config.only:
        if not any(name.startswith(prefix) for name in first.tensors):
            some = ", ".join(sorted({name.split(".")[0] + "." for name in first.tensors})[:8])
            raise MergeError(f"only: no tensor of {first.path} begins with {prefix!r}. Names begin with: {some}")
    return [_plan_tensor(config, info) for info in first.tensors.values()]


def check_paths(config: MergeConfig) -> None:
    """Refuse an output that would destroy an input or something else.

    Raises:
        MergeError: It would.
    """
    out = real_path(config.out)
    for model in config.models:
        source = real_path(model)
        if out == source or out in source.parents or source in out.parents:
            raise MergeError(f"{config.out}: the output overlaps the input {model}. Choose another directory.")
    if not out.exists():
        return
    if not out.is_dir():
        raise MergeError(f"{config.out}: the output is an existing file. Choose a directory.")
    if not config.overwrite:
        raise MergeError(f"{config.out}: the output exists. Remove it, choose another, or replace it with --force.")
    known = (MANIFEST_NAME, "config.json", INDEX_NAME, SINGLE_NAME)
    if any(out.iterdir()) and not any((out / name).exists() for name in known):
        raise MergeError(
            f"{config.out}: the directory is not a model, so --force does not replace it. Choose another output."
        )


def _plan_tensor(config: MergeConfig, info: TensorInfo) -> TensorPlan:
    chosen = not config.only or info.name.startswith(config.only)
    if config.dtype is not None and info.dtype.is_floating_point:
        info = replace(info, dtype=getattr(torch, config.dtype))
    return TensorPlan(info=info, is_merged=chosen and info.dtype.is_floating_point)
