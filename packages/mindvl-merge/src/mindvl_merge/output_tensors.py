# SPDX-License-Identifier: Apache-2.0
"""The tensors that a merge writes, in order, merged or copied; and the check of the output path.

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
class OutputTensor:
    """One tensor of the result."""

    info: TensorInfo  # name, shape and data type in the result
    is_merged: bool  # False: copied from the first model


def output_tensors(config: MergeConfig, first: ModelDirectory) -> list[OutputTensor]:
    """Tensors of the result in the order of the first model.

    Raises:
        MergeError: A prefix in `only` names no tensor.
    """
    for prefix in config.only:
        if not any(name.startswith(prefix) for name in first.tensors):
            some = ", ".join(sorted({name.split(".")[0] + "." for name in first.tensors})[:8])
            raise MergeError(f"only: no tensor of {first.path} starts with {prefix!r}. Use a prefix such as {some}.")
    return [_output_tensor(config, info) for info in first.tensors.values()]


def check_paths(config: MergeConfig) -> None:
    """Refuse an output path that would overwrite an input or anything but a model.

    Raises:
        MergeError: The output overlaps an input, or exists and may not be replaced.
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
        raise MergeError(
            f"{config.out}: the output exists. Remove it, choose another directory, or replace it with --force."
        )
    known = (MANIFEST_NAME, "config.json", INDEX_NAME, SINGLE_NAME)
    if any(out.iterdir()) and not any((out / name).exists() for name in known):
        raise MergeError(
            f"{config.out}: the directory is not a model, so --force does not replace it. Choose another output."
        )


def _output_tensor(config: MergeConfig, info: TensorInfo) -> OutputTensor:
    chosen = not config.only or info.name.startswith(config.only)
    if config.torch_dtype is not None and info.dtype.is_floating_point:
        info = replace(info, dtype=getattr(torch, config.torch_dtype))
    return OutputTensor(info=info, is_merged=chosen and info.dtype.is_floating_point)
