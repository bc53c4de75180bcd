# SPDX-License-Identifier: Apache-2.0
"""Read values of a parent as floating-point numbers: block-scaled float8, and rows matched by token.

Comes after sources.py, before run.py computes. DeepSeek-V3 stores a float8 tensor `X.weight` `[out, in]` with
`X.weight_scale_inv` `[ceil(out / 128), ceil(in / 128)]`; the value is the product of both (its config.json:
`quantization_config`, which multimodal models may have in `text_config`).
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from .directory import ModelDirectory
from .errors import DirectoryError
from .files import read_json, regular_file
from .headers import TensorInfo

if TYPE_CHECKING:
    from .sources import Source

SCALE_SUFFIX = "_scale_inv"
QUANTIZATION = "quantization_config"  # key of config.json, at the top or in text_config

_DEFAULT_BLOCK = (128, 128)


def block_size(path: Path) -> tuple[int, int]:
    """Rows and columns under one scale, by config.json of the directory.

    Raises:
        DirectoryError: The entry is not a pair of positive numbers, or names another kind of quantization.
    """
    if not (path / "config.json").exists():
        return _DEFAULT_BLOCK
    document = read_json(regular_file(path, "config.json"))
    text = document.get("text_config")  # of a multimodal model whose language model alone is quantized
    section = document.get(QUANTIZATION) or (text.get(QUANTIZATION) if isinstance(text, dict) else None)
    if not isinstance(section, dict):
        return _DEFAULT_BLOCK
    kind, size = section.get("quant_method", "fp8"), section.get("weight_block_size", list(_DEFAULT_BLOCK))
    if kind != "fp8" or not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise DirectoryError(
            f"{path / 'config.json'}: quantization_config with quant_method {kind!r:.40} and weight_block_size {size!r:.40} "
            "is not supported. Give a model in bfloat16, or one with fp8 values in blocks."
        )
    return size[0], size[1]


def check_scales(path: Path, info: TensorInfo, scales: TensorInfo | None, block: tuple[int, int]) -> None:
    """Refuse float8 values without fitting scales.

    Raises:
        DirectoryError: The scales are missing or have another shape.
    """
    if scales is None:
        raise DirectoryError(
            f"{path / info.file}: tensor {info.name} has float8 values without {info.name}{SCALE_SUFFIX}. Copy the model "
            "again, or give it in bfloat16."
        )
    expected = (
        (-(-info.shape[0] // block[0]), -(-info.shape[1] // block[1])) if len(info.shape) == 2 else "two dimensions"
    )
    if scales.shape != expected or not scales.is_float:
        raise DirectoryError(
            f"{path / info.file}: tensor {info.name} of shape {list(info.shape)} has scales of shape {list(scales.shape)}, "
            f"expected {expected} for blocks of {block[0]} x {block[1]}. Copy the model again."
        )


def read_values(
    directory: ModelDirectory,
    source: "Source",
    start: int,
    stop: int,
    into: np.ndarray[Any, Any],
    shape: Sequence[int],
    fallback: np.ndarray[Any, Any] | None = None,
    digest: xxhash.xxh3_128 | None = None,
) -> np.ndarray[Any, Any]:
    """Values `start` to `stop` of the flattened result, taken from one parent.

    Args:
        into: Bytes for the stored values, uint8.
        shape: Of the result; its first dimension is that of matched rows and scales.
        fallback: Values of the first model for rows that this parent does not have, `[stop - start]`.
        digest: Updated with the stored bytes, unless rows are matched.

    Returns:
        Array `[stop - start]` of the stored data type, or float32 where values were scaled or matched.
    """
    if source.rows is None and source.scales is None:
        values = directory.read(source.name, start, stop, into)
        if digest is not None:
            digest.update(values.view(np.uint8).data)
        return values
    columns = prod(shape[1:])
    first, left = divmod(start, columns)
    if left + stop - start > columns and (left or stop % columns):  # parts of several rows, which exceed a block
        cut = min(start - left + columns, stop)
        pieces = (
            read_values(directory, source, begin, end, into, shape, kept, digest)
            for begin, end, kept in (
                (start, cut, None if fallback is None else fallback[: cut - start]),
                (cut, stop, None if fallback is None else fallback[cut - start :]),
            )
        )
        return np.concatenate(list(pieces))
    right = min(left + stop - start, columns)
    last = first + (stop - start) // (right - left)
    if source.rows is None:
        return _scaled(directory, source, range(first, last), columns, range(left, right), digest).reshape(-1)
    rows = source.rows[first:last]
    assert fallback is not None
    result = fallback.astype(np.float32).reshape(-1, right - left)
    for begin, end in _runs(rows):
        if rows[begin] >= 0:
            there = range(int(rows[begin]), int(rows[end - 1]) + 1)
            result[begin:end] = _scaled(directory, source, there, columns, range(left, right))
    return result.reshape(-1)


def _scaled(
    directory: ModelDirectory,
    source: "Source",
    rows: range,
    num_columns: int,
    columns: range,
    digest: xxhash.xxh3_128 | None = None,
) -> np.ndarray[Any, Any]:
    """Whole rows, or some columns of one row, multiplied by their scales; `[rows, columns]` float32."""
    begin = rows.start * num_columns + columns.start
    stored = directory.read(source.name, begin, begin + len(rows) * len(columns))
    if digest is not None:
        digest.update(stored.view(np.uint8).data)
    values = stored.astype(np.float32).reshape(-1, len(columns))
    if source.scales is None:
        return values
    (height, width), num_scales = source.block, directory.tensors[source.scales].shape[1]
    top, bottom = rows.start // height, -(-rows.stop // height)
    scales = directory.read(source.scales, top * num_scales, bottom * num_scales).astype(np.float32)
    by_row = scales.reshape(-1, num_scales)[np.arange(rows.start, rows.stop) // height - top]
    values *= np.repeat(by_row, width, axis=1)[:, columns.start : columns.stop]
    return values


def _runs(rows: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Ranges of positions whose rows follow each other, or are all missing."""
    if not len(rows):
        return []
    steps = np.diff(rows)
    breaks = (
        np.flatnonzero((steps != 1) & ~((rows[1:] < 0) & (rows[:-1] < 0)) | ((rows[:-1] < 0) & (rows[1:] >= 0))) + 1
    )
    edges = [0, *breaks.tolist(), len(rows)]
    return list(pairwise(edges))
