# SPDX-License-Identifier: Apache-2.0
"""What the host checks and the kernels of fused attention refuse, in the order in which they look."""

from typing import Any

import torch
from torch import Tensor

from ...errors import OpsError
from .attention_layouts import LAYOUTS, Shapes, heads_of, lengths_of, shapes_of
from .attention_masks import Sparsity, check_content, check_shape, kept
from .elementwise import check_float
from .state import refuse, strict

MAX_HEAD_SIZE = 768
MAX_HEAD_SIZE_TND = 512  # what the document of the packed gradient says
MAX_LENGTH = 2**20


def check(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    layout: str,
    sparsity: Sparsity,
    rest: dict[str, Any],
) -> Shapes:
    """All rules of one call; returns its sizes.

    Raises:
        RefusedError: A rule is broken.
    """
    _check_host(op, query, key, value, head_num, layout, sparsity.mode, rest)
    layout = layout.upper()
    _check_tensors(op, query, key, value, head_num, layout, rest.get("pse"))
    ends = rest["actual_seq_qlen"], rest["actual_seq_kvlen"]
    if layout == "TND":
        for name, tensor, list_of_ends in (("query", query, ends[0]), ("key", key, ends[1])):
            _check_ends(op, name, list_of_ends, len(tensor))
    shapes = shapes_of(query, key, value, head_num, layout, *ends)
    refuse(
        len(shapes.query_lengths) != len(shapes.kv_lengths),
        f"{op}: {len(shapes.query_lengths)} query sequences and {len(shapes.kv_lengths)} key sequences",
    )
    _check_sizes(op, shapes)
    refuse(rest.get("padding_mask") is not None, f"{op}: padding_mask must be None")
    sink = rest.get("sink")
    refuse(
        sink is not None and (sink.dtype != torch.float32 or tuple(sink.shape) != (head_num,)),
        f"{op}: sink must be float32 [{head_num}]",
    )
    _check_pse(op, shapes, sparsity.mode, rest)
    check_shape(op, shapes, sparsity)
    if sparsity.mask is not None:  # without a mask the mode and its tokens are ignored
        _check_mode(op, shapes, sparsity)
    check_content(op, shapes, sparsity)
    return shapes


def _check_host(
    op: str, query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str, mode: int, rest: dict[str, Any]
) -> None:
    refuse(head_num <= 0, f"{op}: head_num must be above 0, got {head_num}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        refuse(tensor.dim() not in (3, 4), f"{op}: {name} has rank {tensor.dim()}, must be 3 or 4")
    keep = rest.get("keep_prob", 1.0)
    refuse(not 0.0 < keep <= 1.0, f"{op}: keep_prob {keep} is outside (0, 1]")
    refuse(layout.upper() not in LAYOUTS, f"{op}: input_layout {layout!r} is none of {', '.join(LAYOUTS)}")
    refuse(
        layout != layout.upper() and strict().upper_case_layout,
        f"{op}: input_layout {layout!r} must be in upper case, the rules of TND are tested before",
    )
    softmax_layout = rest.get("softmax_layout", "")
    refuse(softmax_layout not in ("", "TND"), f"{op}: softmax_layout {softmax_layout!r} is neither '' nor 'TND'")
    packed = layout.upper() == "TND"
    refuse(softmax_layout == "TND" and not packed, f"{op}: softmax_layout TND goes with input_layout TND alone")
    allowed = (0, 1, 2, 3, 4, 6, 7, 8) if packed else (0, 1, 2, 3, 4, 5, 6)
    refuse(mode not in allowed, f"{op}: sparse_mode {mode} is none of {allowed} for {layout}")
    if packed:
        ends = rest["actual_seq_qlen"], rest["actual_seq_kvlen"]
        missing = any(each is None or len(each) == 0 for each in ends)
        refuse(missing, f"{op}: TND needs actual_seq_qlen and actual_seq_kvlen")
        refuse(len(ends[0]) != len(ends[1]), f"{op}: {len(ends[0])} ends of queries and {len(ends[1])} of keys")


def _check_tensors(
    op: str, query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str, pse: Tensor | None
) -> None:
    check_float(op, "query", query)
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        refuse(tensor.dtype != query.dtype, f"{op}: {name} is {tensor.dtype}, query is {query.dtype}")
        refuse(tensor.dim() != len(layout), f"{op}: {name} has rank {tensor.dim()}, layout is {layout}")
    if layout in ("BSH", "SBH"):
        width = query.shape[-1]
        refuse(width % head_num != 0, f"{op}: H = {width} is no multiple of head_num {head_num}")
        size = width // head_num
        refuse(key.shape[-1] % size != 0, f"{op}: width {key.shape[-1]} of key is no multiple of D = {size}")
        kv_heads = key.shape[-1] // size
        refuse(value.shape[-1] % kv_heads != 0, f"{op}: width {value.shape[-1]} of value has not {kv_heads} heads")
        value_size = value.shape[-1] // kv_heads
    else:
        heads = heads_of(query, layout, head_num)
        refuse(heads != head_num, f"{op}: head_num {head_num} is not the {heads} heads of query")
        kv_heads = heads_of(key, layout, head_num)
        refuse(kv_heads != heads_of(value, layout, head_num), f"{op}: key and value differ in heads")
        size, value_size = query.shape[-1], value.shape[-1]
        refuse(key.shape[-1] != size, f"{op}: D of query {size} and of key {key.shape[-1]} differ")
    refuse(head_num % kv_heads != 0, f"{op}: {head_num} query heads are no multiple of {kv_heads} key-value heads")
    refuse(not 1 <= head_num <= 256, f"{op}: {head_num} heads, supported are 1 to 256")
    refuse(value_size > size, f"{op}: D of value {value_size} is above D of key {size}")
    narrow = layout == "TND" and strict().documented_limits
    most = MAX_HEAD_SIZE_TND if narrow else MAX_HEAD_SIZE
    refuse(not 1 <= size <= most, f"{op}: D = {size} is outside 1 to {most}")
    for axis in "BST":
        if axis in layout:
            same = key.shape[layout.index(axis)] == value.shape[layout.index(axis)]
            refuse(not same, f"{op}: key {list(key.shape)} and value {list(value.shape)} differ along {axis}")
    if "B" in layout:
        batches = {tensor.shape[layout.index("B")] for tensor in named.values()}
        refuse(len(batches) > 1, f"{op}: batch sizes {sorted(batches)} differ")


def _check_ends(op: str, name: str, ends: Any, total: int) -> None:
    lengths = lengths_of(ends)
    kept_ends = [int(end) for end in ends][: len(lengths)]
    refuse(min(lengths) < 0, f"{op}: cumulative ends {kept_ends} of {name} decrease")
    refuse(kept_ends[-1] > total, f"{op}: the last end {kept_ends[-1]} is above T = {total} of {name}")
    trailing = [int(end) for end in ends][len(lengths) :]
    refuse(any(trailing), f"{op}: ends {trailing} of {name} follow a dropped sequence")
    limit = 2048 if strict().documented_limits else 20000
    refuse(len(lengths) > limit, f"{op}: {len(lengths)} sequences, at most {limit} in TND")


def _check_sizes(op: str, shapes: Shapes) -> None:
    for name, lengths in (("query", shapes.query_lengths), ("key", shapes.kv_lengths)):
        longest = sum(lengths) if shapes.layout == "TND" else lengths[0]
        refuse(not 1 <= longest <= MAX_LENGTH, f"{op}: length {longest} of {name} is outside 1 to {MAX_LENGTH}")
    refuse(len(shapes.query_lengths) > 2 * 2**20, f"{op}: batch {len(shapes.query_lengths)} is above 2M")


def _check_pse(op: str, shapes: Shapes, mode: int, rest: dict[str, Any]) -> None:
    pse, kind = rest.get("pse"), rest.get("pse_type", 1)
    refuse(kind not in (0, 1, 2, 3), f"{op}: pse_type {kind} is outside 0 to 3")
    if pse is None:
        return
    refuse(mode in (7, 8), f"{op}: pse is forbidden with sparse_mode {mode}")
    empty = 0 in shapes.query_lengths or 0 in shapes.kv_lengths
    refuse(shapes.layout == "TND" and empty, f"{op}: pse is forbidden with sequences of length 0")
    if kind in (2, 3) or shapes.layout == "TND":
        raise OpsError(
            f"{op}: pse_type {kind} in layout {shapes.layout} is not simulated. The documents do not give its "
            "formula; use a dense pse of type 0 or 1 outside TND."
        )
    refuse(pse.dtype != rest["dtype"], f"{op}: pse is {pse.dtype}, query is {rest['dtype']}")
    refuse(pse.dim() != 4, f"{op}: pse has rank {pse.dim()}, must be 4")
    batch, heads = len(shapes.query_lengths), shapes.num_heads
    rows, columns = shapes.query_lengths[0], shapes.kv_lengths[0]
    allowed = {(b, heads, s, columns) for b in (batch, 1) for s in (rows, 1)}
    compressed = (
        rows >= 1024 and rows == columns and tuple(pse.shape) in {(b, heads, 1024, columns) for b in (batch, 1)}
    )
    refuse(
        tuple(pse.shape) not in allowed and not compressed,
        f"{op}: pse {list(pse.shape)} must be one of {sorted(map(list, allowed))}",
    )
    if compressed and rows > 1024:
        raise OpsError(f"{op}: compressed pse for {rows} rows is not simulated. Use the dense form.")


def _check_mode(op: str, shapes: Shapes, sparsity: Sparsity) -> None:
    mode, pre, following = sparsity.mode, sparsity.pre, sparsity.following
    pairs = list(zip(shapes.query_lengths, shapes.kv_lengths, strict=True))
    packed = shapes.layout == "TND"
    if mode == 3 and packed:
        longer = [pair for pair in pairs if pair[0] > pair[1]]
        refuse(bool(longer), f"{op}: sparse_mode 3 in TND needs Sq <= Skv in every sequence, got {longer[:1]}")
    if mode == 4:
        _check_band(op, shapes, sparsity, pairs)
    if mode in (5, 6):
        _check_prefix(op, shapes, sparsity.prefix, pairs)
    filled = [pair for pair in pairs if pair[0]]
    if mode == 7 and filled:
        rows, columns = filled[-1]
        refuse(pre < columns, f"{op}: sparse_mode 7 needs pre >= {columns}, the last Skv, got {pre}")
        refuse(not rows - columns <= following <= 0, f"{op}: sparse_mode 7 needs next in {rows - columns} to 0")
        longer = [pair for pair in filled[:-1] if pair[0] > pair[1]]
        refuse(bool(longer), f"{op}: sparse_mode 7 needs Sq <= Skv in every sequence, got {longer[:1]}")
    if mode == 8 and filled:
        rows, columns = filled[0]
        refuse(pre < columns, f"{op}: sparse_mode 8 needs pre >= {columns}, the first Skv, got {pre}")
        refuse(following < rows - columns, f"{op}: sparse_mode 8 needs next >= {rows - columns}, got {following}")


def _check_band(op: str, shapes: Shapes, sparsity: Sparsity, pairs: list[tuple[int, int]]) -> None:
    pre, following = sparsity.pre, sparsity.following
    if shapes.layout == "TND":
        refuse(pre < 0, f"{op}: sparse_mode 4 in TND needs pre >= 0, got {pre}")
        refuse(following < 0 and pre + following < 0, f"{op}: sparse_mode 4: pre {pre} + next {following} is below 0")
        short = [pair for pair in pairs if pair[0] - following > pair[1]]
        refuse(bool(short), f"{op}: sparse_mode 4 in TND needs Sq - next <= Skv, got {short[:1]} and {following}")
    for keep, (rows, columns) in zip(kept(shapes, sparsity) or [], pairs, strict=True):
        misses = rows * columns > 0 and not bool(keep.any().item())
        refuse(misses, f"{op}: the band of sparse_mode 4 (pre {pre}, next {following}) misses {rows} x {columns}")


def _check_prefix(op: str, shapes: Shapes, prefix: tuple[int, ...] | None, pairs: list[tuple[int, int]]) -> None:
    batch = len(pairs)
    refuse(prefix is None or len(prefix) != batch, f"{op}: prefix must hold {batch} values, got {prefix}")
    refuse(batch > 32, f"{op}: prefix takes at most 32 sequences, got {batch}")
    for value, (rows, columns) in zip(prefix or (), pairs, strict=True):
        lowest = max(columns - rows, 0)
        refuse(not lowest <= value <= columns, f"{op}: prefix {value} is outside {lowest} to {columns}")
