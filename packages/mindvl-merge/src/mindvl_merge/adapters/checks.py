# SPDX-License-Identifier: Apache-2.0
"""Check that the models of a merge are adapters of one base model, before anything is written.

Comes after peft_directory.py read every directory, before average.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..config import MergeConfig
from ..errors import DirectoryError, MergeError
from ..files import real_path
from ..headers import DTYPES, FLOAT8
from ..names import canonical_name, matches
from .peft_directory import (
    BASE_KEY,
    CONFIG_NAME,
    FOLD_HINT,
    WEIGHTS_NAME,
    AdaptedLayer,
    AdapterDirectory,
    is_adapter_directory,
)

_DTYPES = {"fp32": DTYPES["F32"], "bf16": DTYPES["BF16"], "fp16": DTYPES["F16"]}


def are_adapters(config: MergeConfig) -> bool:
    """Whether the models of a merge are adapters.

    Raises:
        MergeError: Only some of them are, or the configuration has a setting that exists for whole models only.
    """
    adapters = [path for path in config.parents if is_adapter_directory(path)]
    if not adapters:
        return False
    whole = [path for path in config.parents if path not in adapters]
    if config.method != "average":
        raise MergeError(f"{adapters[0]}: is an adapter, and method {config.method} needs whole models. {FOLD_HINT}")
    if whole:
        raise MergeError(f"{adapters[0]}: is an adapter, but {whole[0]} is not. {FOLD_HINT}")
    used = [name for name in ("only", "match_tokens", "allow_missing") if getattr(config, name)]
    if used:
        raise MergeError(f"{used[0]}: is for whole models, and {adapters[0]} is an adapter. Remove it. {FOLD_HINT}")
    return True


def is_selected(name: str, pattern: str) -> bool:
    """Whether a part, name prefix or pattern selects a layer, as it selects the tensor of its weight in the model."""
    names = (name, f"{name}.weight")
    return any(matches(one, pattern) or matches(canonical_name(one), pattern) for one in names)


def result_dtype(config: MergeConfig, directories: Sequence[AdapterDirectory]) -> np.dtype[Any]:
    """The data type of the written matrices.

    Raises:
        DirectoryError: The adapters have several data types, or float8, and the configuration does not choose one.
    """
    if config.dtype is not None:
        return _DTYPES[config.dtype]
    first = next(iter(directories[0].weights.tensors.values()))
    for directory in directories:
        for info in directory.weights.tensors.values():
            if info.dtype != first.dtype or info.dtype in FLOAT8:
                raise DirectoryError(
                    f"{directory.path / WEIGHTS_NAME}: tensor {info.name} is stored as {info.dtype}, and the first one of "
                    f"{directories[0].path} as {first.dtype}. Choose the type of the result (--dtype fp32)."
                )
    return first.dtype


def check_bases(config: MergeConfig, directories: Sequence[AdapterDirectory]) -> None:
    """Refuse adapters whose configurations name different base models; one that names none may belong to any."""
    known = [one for one in directories if one.config.get(BASE_KEY)]
    if BASE_KEY in config.allow_different or not known:
        return
    for other in known[1:]:
        first, base = str(known[0].config[BASE_KEY]), str(other.config[BASE_KEY])
        if base.rstrip("/") != first.rstrip("/") and real_path(Path(base)) != real_path(Path(first)):
            raise DirectoryError(
                f"{other.path / CONFIG_NAME}: {BASE_KEY} is {base:.200}, but {first:.200} in {known[0].path}. Merge adapters of "
                f"one base model; if both names are the same model, pass --allow-different {BASE_KEY}."
            )


def check_layers(layers: Mapping[str, Mapping[int, AdaptedLayer]], directories: Sequence[AdapterDirectory]) -> None:
    """Refuse layers whose sizes differ between adapters, and layers whose names are those of two transformers versions."""
    spellings: dict[str, str] = {}
    for name, adapted in layers.items():
        (number, first), *others = adapted.items()
        for other, layer in others:
            if layer.size != first.size:
                raise DirectoryError(
                    f"{directories[other].path / WEIGHTS_NAME}: the adapter of {name} is for experts, outputs and inputs "
                    f"{list(layer.size)}, but for {list(first.size)} in {directories[number].path}. Merge adapters of one base "
                    "model."
                )
        spelling = spellings.setdefault(canonical_name(name), name)
        if spelling != name:
            raise DirectoryError(
                f"{directories[number].path / WEIGHTS_NAME}: {name} is {spelling} in another adapter. Save both adapters again "
                "with one version of transformers."
            )


def check_patterns(config: MergeConfig, names: Sequence[str]) -> None:
    """Refuse weights for a part, prefix or pattern that selects no layer."""
    for pattern in config.part_weights:
        if not any(is_selected(name, pattern) for name in names):
            raise MergeError(
                f"part_weights: no adapted layer is selected by {pattern!r}. Use vision, projector or language, or a prefix such "
                f"as {names[0]}."
            )
