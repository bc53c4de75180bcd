# SPDX-License-Identifier: Apache-2.0
"""The tensors that a merge writes, in order, each with the tensors of the parents that it is made from.

Comes after directory.py, before parents.py compares the configurations and run.py writes. Tensors are paired by canonical
name (names.py), so that the language model inside of a multimodal model and the same one stored alone fit together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .config import MergeConfig
from .directory import ModelDirectory
from .errors import DirectoryError, MergeError
from .files import read_json, regular_file
from .headers import DTYPES, FLOAT8, TensorInfo
from .names import EMBEDDING, HEAD, canonical_name, matches_any
from .quantization import SCALE_SUFFIX, block_size, check_scales
from .vocabulary import matching_rows

_OUTPUT_DTYPES = {"fp32": DTYPES["F32"], "bf16": DTYPES["BF16"], "fp16": DTYPES["F16"]}


@dataclass(frozen=True, kw_only=True)
class Source:
    """One tensor of one parent."""

    parent: int  # index in `MergeConfig.parents`
    name: str
    scales: str | None = None  # tensor with the block scales of float8 values
    block: tuple[int, int] = (1, 1)  # rows and columns of values under one scale
    rows: npt.NDArray[np.int64] | None = None  # row for each row of the result, or -1; None: the same rows


@dataclass(frozen=True, kw_only=True)
class OutputTensor:
    """One tensor of the result."""

    info: TensorInfo  # name, shape and data type in the result
    sources: tuple[Source, ...]  # one per parent; only that of the first model if it is copied
    weights: tuple[float, ...] = ()  # one per model if it is merged

    @property
    def is_merged(self) -> bool:
        """Whether it is computed from all models; otherwise it is a copy from the first."""
        return bool(self.weights)


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """What a merge writes, and what it does not use."""

    outputs: tuple[OutputTensor, ...]
    unused: tuple[tuple[int, str], ...]  # parent and name of each input tensor that the result does not contain


def pair_tensors(config: MergeConfig, directories: Sequence[ModelDirectory]) -> Pairing:
    """Find the tensors of all parents that belong together.

    Raises:
        MergeError: A tensor is missing or has another shape or data type in one of the models; a name in `only`,
            `part_weights` or `allow_missing` selects no tensor.
    """
    for directory in directories:
        block_size(directory.path)  # refuses quantization that is not supported
    parents = [_Parent(number, directory) for number, directory in enumerate(directories)]
    _refuse_patterns_without_tensor(config, parents)
    _refuse_missing(config, parents)
    rows = _RowsByToken(config, directories)
    outputs = []
    for canonical, info in parents[0].tensors.items():
        is_chosen = _is_chosen(config, info)
        found = [parent.find(canonical) for parent in parents]
        lacking = [parent for parent, other in zip(parents, found, strict=True) if other is None]
        needed = is_chosen or not (config.only or info.is_float)  # without `only`, integers must be equal in all models
        sources = [
            _source(config, parent, other, info, rows)
            for parent, other in zip(parents, found, strict=True)
            if other is not None and (needed or parent is parents[0])
        ]
        outputs.append(_output(config, info, sources, is_merged=is_chosen and not lacking))
    used = {(source.parent, name) for one in outputs for source in one.sources for name in (source.name, source.scales)}
    unused = [
        (parent.number, name) for parent in parents for name in parent.names() if (parent.number, name) not in used
    ]
    _refuse_lost(config, parents, unused)
    return Pairing(outputs=tuple(outputs), unused=tuple(unused))


class _Parent:
    """The tensors of one directory by canonical name, without the scales of float8 values."""

    def __init__(self, number: int, directory: ModelDirectory) -> None:
        self.number = number
        self.directory = directory
        self.tensors: dict[str, TensorInfo] = {}
        for info in directory.tensors.values():
            if self._is_scale(info.name):
                continue
            canonical = canonical_name(info.name)
            if canonical in self.tensors:
                raise DirectoryError(
                    f"{directory.path / info.file}: tensors {info.name} and {self.tensors[canonical].name} are the same "
                    "part of the model. Remove one of them."
                )
            self.tensors[canonical] = info

    def find(self, canonical: str) -> TensorInfo | None:
        """The tensor of this name; an output layer that is not stored is the embedding, unless config.json denies it."""
        if canonical == HEAD and HEAD not in self.tensors and _is_tied(self) is not False:
            return self.tensors.get(EMBEDDING)
        return self.tensors.get(canonical)

    def scales(self, info: TensorInfo) -> TensorInfo | None:
        """The block scales of a float8 tensor."""
        return self.directory.tensors.get(info.name + SCALE_SUFFIX)

    def names(self) -> list[str]:
        """All tensors of the directory."""
        return list(self.directory.tensors)

    def _is_scale(self, name: str) -> bool:
        values = self.directory.tensors.get(name.removesuffix(SCALE_SUFFIX))
        return name.endswith(SCALE_SUFFIX) and values is not None and values.dtype in FLOAT8


class _RowsByToken:
    """Row numbers by token for each parent, computed once."""

    def __init__(self, config: MergeConfig, directories: Sequence[ModelDirectory]) -> None:
        self._is_wanted = config.match_tokens or config.is_language_only
        self._directories = directories
        self._known: dict[tuple[int, int, int], npt.NDArray[np.int64] | None] = {}

    def of(self, canonical: str, parent: int, num_rows: int, num_other_rows: int) -> npt.NDArray[np.int64] | None:
        """The rows of a parent's embedding or output layer; None if they have the same numbers."""
        if not self._is_wanted or parent == 0 or canonical not in (HEAD, EMBEDDING):
            return None
        key = (parent, num_rows, num_other_rows)
        if key not in self._known:
            first, other = self._directories[0].path, self._directories[parent].path
            rows = matching_rows(first, other, num_rows, num_other_rows)
            is_same = num_rows == num_other_rows and bool((rows == np.arange(num_rows)).all())
            self._known[key] = None if is_same else rows
        return self._known[key]


def _source(config: MergeConfig, parent: _Parent, info: TensorInfo, first: TensorInfo, rows: _RowsByToken) -> Source:
    matched = None
    if len(info.shape) == 2 and len(first.shape) == 2:
        matched = rows.of(canonical_name(first.name), parent.number, first.shape[0], info.shape[0])
    file = parent.directory.path / info.file
    if info.shape != first.shape and (matched is None or info.shape[1:] != first.shape[1:]):
        hint = ""
        if canonical_name(first.name) in (HEAD, EMBEDDING) and info.shape[1:] == first.shape[1:]:
            hint = ", or match their rows by token (--match-tokens)"
        raise DirectoryError(
            f"{file}: tensor {info.name} has shape {list(info.shape)}, but {list(first.shape)} in the first model. Merge "
            f"models of one size{hint}."
        )
    both_float = info.is_float and first.is_float
    if _stored(info) != _stored(first) and not (config.dtype is not None and both_float):
        raise DirectoryError(
            f"{file}: tensor {info.name} is stored as {info.dtype}, but as {first.dtype} in the first model. Choose the type "
            "of the result (--dtype) to mix them."
        )
    if info.dtype not in FLOAT8:
        return Source(parent=parent.number, name=info.name, rows=matched)
    scales, block = parent.scales(info), block_size(parent.directory.path)
    check_scales(parent.directory.path, info, scales, block)
    return Source(parent=parent.number, name=info.name, scales=info.name + SCALE_SUFFIX, block=block, rows=matched)


def _output(config: MergeConfig, info: TensorInfo, sources: Sequence[Source], *, is_merged: bool) -> OutputTensor:
    dtype = info.dtype
    if info.is_float:
        dtype = _OUTPUT_DTYPES[config.dtype] if config.dtype is not None else _stored(info)
    weights: tuple[float, ...] = ()
    if is_merged:
        weights = config.model_weights
        for pattern, values in config.part_weights.items():
            if _selected(info.name, (pattern,)):
                weights = values
                break
    kept = tuple(sources) if is_merged or not info.is_float else tuple(sources[:1])
    return OutputTensor(info=replace(info, dtype=dtype), sources=kept, weights=weights)


def _stored(info: TensorInfo) -> np.dtype[Any]:
    """The data type of the values; block-scaled float8 values are bfloat16 values in fewer bytes."""
    return DTYPES["BF16"] if info.dtype in FLOAT8 else info.dtype


def _is_chosen(config: MergeConfig, info: TensorInfo) -> bool:
    return info.is_float and (not config.only or _selected(info.name, config.only))


def _selected(name: str, patterns: Sequence[str]) -> bool:
    return matches_any(name, patterns) or matches_any(canonical_name(name), patterns)


def _refuse_patterns_without_tensor(config: MergeConfig, parents: Sequence[_Parent]) -> None:
    names = list(parents[0].directory.tensors)
    everywhere = [name for parent in parents for name in parent.names()]
    some = ", ".join(sorted({name.split(".")[0] + "." for name in names})[:8])
    checks: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
        "only": (config.only, names),
        "part_weights": (tuple(config.part_weights), names),
        "allow_missing": (config.allow_missing, everywhere),
    }
    for where, (patterns, candidates) in checks.items():
        for pattern in patterns:
            if not any(_selected(name, (pattern,)) for name in candidates):
                raise MergeError(
                    f"{where}: no tensor of {parents[0].directory.path} starts with {pattern!r}. Use vision, projector or "
                    f"language, or a prefix such as {some}."
                )


def _refuse_missing(config: MergeConfig, parents: Sequence[_Parent]) -> None:
    first = parents[0]
    for canonical, info in first.tensors.items():
        if not _is_chosen(config, info) or _selected(info.name, config.allow_missing):
            continue
        for other in parents[1:]:
            if other.find(canonical) is not None:
                continue
            count = len(first.tensors.keys() ^ other.tensors.keys())
            raise DirectoryError(
                f"{other.directory.path}: {count} tensors are in only one of the models, the first is {info.name} of "
                f"{first.directory.path}. Merge models of one architecture, or only the part that they share (--only "
                f"language), or copy tensors that other models lack from the first one (--allow-missing {info.name})."
            )


def _refuse_lost(config: MergeConfig, parents: Sequence[_Parent], unused: Sequence[tuple[int, str]]) -> None:
    """Every tensor of another model is used, outside of the merged part, or named by the user."""
    for number, name in unused:
        parent = parents[number]
        in_first = canonical_name(name) in parents[0].tensors or parent._is_scale(name)
        is_outside = bool(config.only) and not _selected(name, config.only)
        if number == 0 or is_outside or in_first or _selected(name, config.allow_missing):
            continue
        if canonical_name(name) == HEAD and _is_tied(parent):
            continue  # a stored copy of the embedding
        count = sum(canonical_name(other) not in parents[0].tensors for which, other in unused if which == number)
        raise DirectoryError(
            f"{parents[0].directory.path}: {count} tensors are in only one of the models, the first is {name} of "
            f"{parent.directory.path}. Merge models of one architecture, name the model with more tensors first, or leave "
            f"them out (--allow-missing {name})."
        )


def _is_tied(parent: _Parent) -> bool | None:
    """Whether config.json ties the output layer to the embedding; None if it does not say."""
    if not (parent.directory.path / "config.json").exists():
        return None
    document = read_json(regular_file(parent.directory.path, "config.json"))
    text = document.get("text_config")
    sections = [document, *([text] if isinstance(text, dict) else [])]
    values = [section["tie_word_embeddings"] for section in sections if "tie_word_embeddings" in section]
    return any(value is True for value in values) if values else None
