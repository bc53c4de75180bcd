# SPDX-License-Identifier: Apache-2.0
"""npu_fusion_attention in its three versions and its gradient: float32 inside, one rounding at the end.

Dropout draws its bits from seed and offset alone; they are not the bits of the device, which nothing else can know.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import OpsError
from . import attention_rules
from .attention_layouts import Shapes, from_statistics, joined, sequences, shapes_of, statistics
from .attention_masks import Sparsity, kept
from .operators import operator
from .state import refuse

MASKED = torch.finfo(torch.float32).min  # at masked places: an all-masked row comes out near-uniform
LEARNED = ("query", "key", "value", "pse", "sink")


def _sparsity(arguments: dict[str, Any]) -> Sparsity:
    pre = arguments["pre_tokens"] if "pre_tokens" in arguments else arguments["pre_tockens"]
    following = arguments["next_tokens"] if "next_tokens" in arguments else arguments["next_tockens"]
    prefix = arguments["prefix"]
    prefix = None if prefix is None else tuple(int(value) for value in prefix)
    return Sparsity(arguments["sparse_mode"], arguments["atten_mask"], pre, following, prefix)


def _with_rope(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Query and key, the separate rotary part (v2) appended."""
    query, key = arguments["query"], arguments["key"]
    if arguments.get("query_rope") is None:
        return query, key
    return torch.cat((query, arguments["query_rope"]), -1), torch.cat((key, arguments["key_rope"]), -1)


def _check(op: str, arguments: dict[str, Any]) -> None:
    ropes = [arguments.get(name) is None for name in ("query_rope", "key_rope")]
    refuse(ropes[0] != ropes[1], f"{op}: query_rope and key_rope go together")
    query, key = _with_rope(arguments)
    rest = {**arguments, "dtype": query.dtype}
    head_num, layout = arguments["head_num"], arguments["input_layout"]
    attention_rules.check(op, query, key, arguments["value"], head_num, layout, _sparsity(arguments), rest)
    if arguments.get("dropout_mask") is not None:
        raise OpsError(f"{op}: dropout_mask is not simulated. The documents do not give its layout; leave it out.")


def _shapes(arguments: dict[str, Any]) -> Shapes:
    query, key = _with_rope(arguments)
    ends = arguments["actual_seq_qlen"], arguments["actual_seq_kvlen"]
    layout = arguments["input_layout"].upper()
    return shapes_of(query, key, arguments["value"], arguments["head_num"], layout, *ends)


def _forward(arguments: dict[str, Any], seed: int, offset: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """(out, softmax_max, softmax_sum, empty, numels)."""
    shapes, sparsity = _shapes(arguments), _sparsity(arguments)
    query, key = _with_rope(arguments)
    value, sink = arguments["value"], arguments["sink"]
    queries = sequences(query, shapes.layout, shapes.num_heads, shapes.query_lengths)
    keys = sequences(key, shapes.layout, shapes.num_kv_heads, shapes.kv_lengths)
    values = sequences(value, shapes.layout, shapes.num_kv_heads, shapes.kv_lengths)
    keeps: Sequence[Tensor | None] = kept(shapes, sparsity) or [None] * len(queries)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + offset)
    outs, maxima, sums = [], [], []
    for index, (q, k, v, keep) in enumerate(zip(queries, keys, values, keeps, strict=True)):
        logits = _logits(q, k, arguments, index, keep)
        top = logits.amax(dim=-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], MASKED)
        if sink is not None:
            top = torch.maximum(top, sink[:, None])
        exponents = torch.exp(logits - top[..., None])
        total = exponents.sum(dim=-1)
        if sink is not None:
            total = total + torch.exp(sink[:, None] - top)
        probabilities = exponents / total.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
        probabilities = probabilities * _dropout(probabilities, arguments["keep_prob"], generator)
        if keep is not None and _zeroes_invalid_rows(arguments, shapes, index):
            probabilities = probabilities * keep.any(dim=-1, keepdim=True)
        outs.append(probabilities @ _repeated(v, shapes))
        maxima.append(top)
        sums.append(total)
    total_rows = len(query) if shapes.layout == "TND" else 0
    packing = shapes.layout, arguments["softmax_layout"], total_rows
    out = joined(outs, shapes.layout, total_rows).to(query.dtype)
    return out, statistics(maxima, *packing), statistics(sums, *packing), query.new_empty(0), shapes.numels


def _logits(q: Tensor, k: Tensor, arguments: dict[str, Any], index: int, keep: Tensor | None) -> Tensor:
    """`[N, Sq, Skv]`: scale * (QK^T + pse), or scale * QK^T + pse for pse_type 0."""
    scores = q @ k.repeat_interleave(len(q) // len(k), dim=0).transpose(-1, -2)
    scale, pse = arguments["scale"], arguments["pse"]
    if pse is None:
        logits = scores * scale
    else:
        part = pse[min(index, len(pse) - 1)].float()
        logits = scores * scale + part if arguments.get("pse_type", 1) == 0 else (scores + part) * scale
    return logits if keep is None else logits.masked_fill(~keep, MASKED)


def _repeated(v: Tensor, shapes: Shapes) -> Tensor:
    return v.repeat_interleave(shapes.num_heads // shapes.num_kv_heads, dim=0)


def _dropout(like: Tensor, keep_prob: float, generator: torch.Generator) -> Tensor | float:
    if keep_prob == 1.0:
        return 1.0
    return (torch.rand(like.shape, generator=generator) < keep_prob).to(like) / keep_prob


def _zeroes_invalid_rows(arguments: dict[str, Any], shapes: Shapes, index: int) -> bool:
    """Rows without a kept place give 0 when asked for, and by themselves for modes 3 and 4 outside TND."""
    if arguments["inner_precise"] == 2:
        return True
    longer = shapes.query_lengths[index] > shapes.kv_lengths[index]
    mode = arguments["sparse_mode"]
    return shapes.layout != "TND" and (mode == 4 or (mode == 3 and longer))


@operator(
    "npu_fusion_attention",
    rules=lambda **a: _check("npu_fusion_attention", a),
    learns=LEARNED,
    carries=(0, 1, 2, 3),
    uses=(0,),
)
@operator(
    "npu_fusion_attention_v2",
    rules=lambda **a: _check("npu_fusion_attention_v2", a),
    learns=(*LEARNED, "query_rope", "key_rope"),
    carries=(0, 1, 2, 3),
    uses=(0,),
)
def fusion_attention(**arguments: Any) -> tuple[Any, ...]:
    """Both versions; version 2 has separate rotary parts, pse_type, `pre_tokens` spelt right."""
    *outputs, numels = _forward(arguments, arguments["seed"], arguments["offset"])
    return *outputs, arguments["seed"], arguments["offset"], numels


def _check_v3(**arguments: Any) -> None:
    op = "npu_fusion_attention_v3"
    for name in ("actual_seq_qlen", "actual_seq_kvlen"):
        ends = arguments[name]
        wrong = ends is not None and (ends.dim() != 1 or ends.is_floating_point() or ends.device.type != "cpu")
        refuse(wrong, f"{op}: {name} must be a 1-D integer tensor on the CPU")
    _check(op, arguments)


@operator("npu_fusion_attention_v3", rules=_check_v3, learns=LEARNED, carries=(0, 1, 2, 3), uses=(0,))
def fusion_attention_v3(**arguments: Any) -> tuple[Tensor, ...]:
    """Version 3, for graph capture: lengths come as CPU tensors, seed and offset go back as tensors."""
    *outputs, _ = _forward(arguments, 0, 0)
    return *outputs, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


def _check_grad(**arguments: Any) -> None:
    op = "npu_fusion_attention_grad"
    _check(op, arguments)
    refuse(arguments["softmax_in"] is not None, f"{op}: softmax_in must be None")
    for name in ("softmax_max", "softmax_sum", "attention_in"):
        refuse(arguments[name] is None, f"{op}: {name} is missing")
    shapes, query = _shapes(arguments), arguments["query"]
    dense = (len(shapes.query_lengths), shapes.num_heads, shapes.query_lengths[0], 8)
    wanted = (len(query), shapes.num_heads, 8) if shapes.layout == "TND" else dense
    for name in ("softmax_max", "softmax_sum"):
        tensor = arguments[name]
        wrong = tensor.dtype != torch.float32 or tuple(tensor.shape) != wanted
        refuse(wrong, f"{op}: {name} must be float32 {list(wanted)}, got {tensor.dtype} {list(tensor.shape)}")
    dy, out = arguments["dy"], arguments["attention_in"]
    refuse(dy.shape != out.shape, f"{op}: dy {list(dy.shape)} and attention_in {list(out.shape)} differ in shape")
    refuse(dy.dtype != query.dtype, f"{op}: dy is {dy.dtype}, query is {query.dtype}")


@operator("npu_fusion_attention_grad", rules=_check_grad)
def fusion_attention_grad(**arguments: Any) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dpse or None, dsink or an empty tensor) from the saved output, maxima and sums."""
    shapes = _shapes(arguments)
    arguments = {**arguments, "scale": arguments["scale_value"]}
    layout, lengths, kv_lengths = shapes.layout, shapes.query_lengths, shapes.kv_lengths
    stats = (
        from_statistics(arguments[name], layout, arguments["softmax_layout"], lengths)
        for name in ("softmax_max", "softmax_sum")
    )
    keeps: Sequence[Tensor | None] = kept(shapes, _sparsity(arguments)) or [None] * len(lengths)
    pieces = zip(
        sequences(arguments["query"], layout, shapes.num_heads, lengths),
        sequences(arguments["key"], layout, shapes.num_kv_heads, kv_lengths),
        sequences(arguments["value"], layout, shapes.num_kv_heads, kv_lengths),
        sequences(arguments["dy"], layout, shapes.num_heads, lengths),
        sequences(arguments["attention_in"], layout, shapes.num_heads, lengths),
        *stats,
        keeps,
        strict=True,
    )
    generator = torch.Generator().manual_seed(arguments["seed"] * 1_000_003 + arguments["offset"])
    found = [_grad_of(index, shapes, arguments, generator, *piece) for index, piece in enumerate(pieces)]
    dq, dk, dv, dlogits, dsink = zip(*found, strict=True)
    rows, kv_rows = (len(arguments[name]) for name in ("query", "key"))
    dtype = arguments["query"].dtype
    pse, sink = arguments["pse"], arguments["sink"]
    dpse = None
    if pse is not None:
        factor = 1.0 if arguments.get("pse_type", 1) == 0 else arguments["scale"]
        dpse = (torch.stack(dlogits) * factor).sum_to_size(pse.shape).to(dtype)
    return (
        joined(list(dq), layout, rows).to(dtype),
        joined(list(dk), layout, kv_rows).to(dtype),
        joined(list(dv), layout, kv_rows).to(dtype),
        dpse,
        torch.empty(0) if sink is None else torch.stack(dsink).sum(dim=0),
    )


def _grad_of(
    index: int,
    shapes: Shapes,
    arguments: dict[str, Any],
    generator: torch.Generator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dy: Tensor,
    out: Tensor,
    top: Tensor,
    total: Tensor,
    keep: Tensor | None,
) -> Sequence[Tensor]:
    """Gradients of one sequence: dq, dk, dv, dlogits, dsink."""
    group = shapes.num_heads // shapes.num_kv_heads
    logits = _logits(q, k, arguments, index, keep)
    probabilities = torch.exp(logits - top[..., None]) / total[..., None]
    dropped = probabilities * (drop := _dropout(probabilities, arguments["keep_prob"], generator))
    inner = (dy * out).sum(dim=-1, keepdim=True)
    dlogits = probabilities * ((dy @ _repeated(v, shapes).transpose(-1, -2)) * drop - inner)
    if keep is not None:
        dlogits = dlogits.masked_fill(~keep, 0.0)
    scaled = dlogits * arguments["scale"]
    dk = (scaled.transpose(-1, -2) @ q).unflatten(0, (-1, group)).sum(dim=1)
    dv = (dropped.transpose(-1, -2) @ dy).unflatten(0, (-1, group)).sum(dim=1)
    sink = arguments["sink"]
    dsink = torch.zeros(len(q)) if sink is None else -(torch.exp(sink[:, None] - top) / total * inner[..., 0]).sum(-1)
    return scaled @ k.repeat_interleave(group, dim=0), dk, dv, dlogits, dsink
