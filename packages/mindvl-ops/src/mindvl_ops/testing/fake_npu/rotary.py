# SPDX-License-Identifier: Apache-2.0
"""Rotary operators: npu_rotary_mul with its backward, npu_apply_rotary_pos_emb (in place), npu_mrope.

Numbers: cosine and sine are first cast to the type of x, then float32 and one rounding.
"""

import torch
from torch import Tensor

from .elementwise import check_float
from .operators import operator
from .state import refuse, strict

MODES = ("half", "interleave")


def turned(x: Tensor, mode: str) -> Tensor:
    """(a, b) -> (-b, a) for every pair."""
    if mode == "interleave":
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _fits(x: Tensor, table: Tensor, mode: str) -> list[tuple[int, int]]:
    """(B, N) of every layout in which the shape of the table is allowed."""
    shape = tuple(table.shape[:-1])
    if x.dim() == 3:  # TND
        return [(1, x.shape[1])] if shape in {(x.shape[0], 1), tuple(x.shape[:-1])} else []
    a, b, c = x.shape[:-1]
    layouts = [  # B, N, allowed from the smallest to the full table
        (a, b, [(1, 1, c), (a, 1, c), (a, b, c)]),  # BNSD
        (a, c, [(1, b, 1), (a, b, 1), (a, b, c)]),  # BSND
        (b, c, [(a, 1, 1), (a, b, 1), (a, b, c)]),  # SBND
    ]
    only_first = 1 if mode == "interleave" else 3
    return [(batch, heads) for batch, heads, allowed in layouts if shape in allowed[:only_first]]


def _mul_rules(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None = None) -> None:
    op = "npu_rotary_mul"
    refuse(rotary_mode not in MODES, f"{op}: rotary_mode {rotary_mode!r} is neither 'half' nor 'interleave'")
    for name, tensor in (("input", input), ("r1", r1), ("r2", r2)):
        check_float(op, name, tensor)
    refuse(input.dim() not in (3, 4), f"{op}: input has rank {input.dim()}, must be 3 (TND) or 4")
    size = input.shape[-1]
    refuse(size % 2 != 0 or size >= 896, f"{op}: D = {size} must be even and below 896")
    refuse(r1.shape != r2.shape, f"{op}: r1 {list(r1.shape)} and r2 {list(r2.shape)} differ in shape")
    refuse(r1.dim() != input.dim() or r1.shape[-1] != size, f"{op}: r1 {list(r1.shape)} lacks the rank or D of input")
    fits = _fits(input, r1, rotary_mode)
    refuse(not fits, f"{op}: r1 {list(r1.shape)} fits no layout of input {list(input.shape)} in mode {rotary_mode}")
    if rotary_mode == "half":
        fits = [(batch, heads) for batch, heads in fits if batch < 1000 and heads < 1000]
        refuse(not fits, f"{op}: B and N must be below 1000, input {list(input.shape)}")
        learned = r1.requires_grad or r2.requires_grad
        few = any(batch * heads <= 1024 for batch, heads in fits)
        refuse(learned and not few, f"{op}: B*N must not pass 1024 when r1 or r2 needs a gradient")
    else:
        few = any(batch * heads < 1000 for batch, heads in fits)
        refuse(not few, f"{op}: B*N must be below 1000 in mode interleave, input {list(input.shape)}")
    refuse(
        rotate is not None and torch.is_grad_enabled() and input.requires_grad,
        f"{op}: with a rotate matrix there is no backward, input requires a gradient",
    )
    if strict().rotary_range and r1.numel():
        largest = max(r1.abs().max().item(), r2.abs().max().item())
        refuse(largest > 1.0 + 1e-2, f"{op}: r1 and r2 must lie in [-1, 1], largest is {largest:g}")


@operator("npu_rotary_mul", rules=_mul_rules, learns=("input", "r1", "r2"))
def rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None) -> Tensor:
    """input * r1 + turned(input) * r2."""
    wide = input.float()
    other = turned(wide, rotary_mode) if rotate is None else wide @ rotate.float()
    cosine, sine = r1.to(input.dtype).float(), r2.to(input.dtype).float()
    return (wide * cosine + other * sine).to(input.dtype)


@operator("npu_rotary_mul_backward")
def rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dr1, dr2)."""
    wide, cosine, sine = grad.float(), r1.to(input.dtype).float(), r2.to(input.dtype).float()
    dx = wide * cosine - turned(wide * sine, rotary_mode)  # the turn back is minus the turn
    dr1 = (wide * input.float()).sum_to_size(r1.shape)
    dr2 = (wide * turned(input.float(), rotary_mode)).sum_to_size(r2.shape)
    return dx.to(input.dtype), dr1.to(r1.dtype), dr2.to(r2.dtype)


def _apply_rules(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str, rotary_mode: str) -> None:
    op = "npu_apply_rotary_pos_emb"
    refuse(layout not in ("BSND", "TND"), f"{op}: layout {layout!r} is neither BSND nor TND")
    refuse(rotary_mode != "half", f"{op}: rotary_mode {rotary_mode!r}, this device has half alone")
    tensors = {"query": query, "key": key, "cos": cos, "sin": sin}
    for name, tensor in tensors.items():
        check_float(op, name, tensor)
        refuse(tensor.dim() != len(layout), f"{op}: {name} has rank {tensor.dim()}, layout is {layout}")
        refuse(tensor.numel() == 0, f"{op}: {name} is empty")
    refuse(len({tensor.dtype for tensor in tensors.values()}) > 1, f"{op}: all four tensors must have one type")
    sizes = {tensor.shape[-1] for tensor in tensors.values()}
    refuse(len(sizes) > 1 or not sizes <= {64, 128}, f"{op}: D must be 64 or 128 everywhere, got {sorted(sizes)}")
    refuse(len({tensor.shape[:-2] for tensor in tensors.values()}) > 1, f"{op}: leading axes differ")
    refuse(cos.shape[-2] != 1 or sin.shape[-2] != 1, f"{op}: cos and sin must have N = 1")


@operator("npu_apply_rotary_pos_emb", rules=_apply_rules, derivative="raises")
def apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str, rotary_mode: str
) -> tuple[Tensor, Tensor]:
    """Query and key, turned in place and returned."""
    outputs = []
    for tensor in (query, key):
        wide = tensor.detach().float()
        result = (wide * cos.float() + turned(wide, rotary_mode) * sin.float()).to(tensor.dtype)
        tensor.detach().copy_(result)
        outputs.append(result)
    return outputs[0], outputs[1]


def _mrope_rules(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    mrope_section: list[int] | None,
    rotary_mode: str,
    cache_mode: str,
) -> None:
    op = "npu_mrope"
    refuse(rotary_mode not in MODES, f"{op}: rotary_mode {rotary_mode!r} is neither 'half' nor 'interleave'")
    refuse(cache_mode not in ("default", "interleave"), f"{op}: cache_mode {cache_mode!r} is unknown")
    refuse(positions.dtype not in (torch.int32, torch.int64), f"{op}: positions are {positions.dtype}")
    types = {query.dtype, key.dtype, cos_sin_cache.dtype}
    refuse(len(types) > 1, f"{op}: query, key and cos_sin_cache must have one type")
    check_float(op, "query", query)
    for name, tensor in (("query", query), ("key", key), ("cos_sin_cache", cos_sin_cache)):
        refuse(tensor.dim() != 2, f"{op}: {name} has rank {tensor.dim()}, must be 2")
    refuse(
        query.shape[1] % head_size != 0 or key.shape[1] % head_size != 0,
        f"{op}: widths {query.shape[1]}, {key.shape[1]} are no multiples of head_size {head_size}",
    )
    rotary, step = cos_sin_cache.shape[1], 16 if query.dtype == torch.float32 else 32
    refuse(rotary % step != 0 or rotary > head_size, f"{op}: rotary size {rotary} must be a multiple of {step}")
    sections = mrope_section or [0, 0, 0]
    wanted = (3, len(query)) if any(sections) else (len(query),)
    refuse(tuple(positions.shape) != wanted, f"{op}: positions {list(positions.shape)} must be {list(wanted)}")
    refuse(any(sections) and sum(sections) != rotary // 2, f"{op}: mrope_section {sections} must sum to {rotary // 2}")
    outside = positions.numel() > 0 and not 0 <= positions.min().item() <= positions.max().item() < len(cos_sin_cache)
    refuse(outside, f"{op}: a position lies outside the cache of {len(cos_sin_cache)} rows")


@operator("npu_mrope", rules=_mrope_rules)
def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    mrope_section: list[int] | None,
    rotary_mode: str,
    cache_mode: str,
) -> tuple[Tensor, Tensor]:
    """Angles looked up by position, three axes mixed by section, then the heads turned."""
    table = cos_sin_cache.float()[positions.long()]  # [T, R] or [3, T, R]
    cosine, sine = table.chunk(2, dim=-1)
    if mrope_section and any(mrope_section):
        axis = _axis_of_pair(mrope_section, cache_mode)
        pair = torch.arange(len(axis))
        cosine, sine = (half[torch.tensor(axis), :, pair].T for half in (cosine, sine))  # [T, R/2]
    widen = (lambda x: x.repeat_interleave(2, -1)) if rotary_mode == "interleave" else (lambda x: torch.cat((x, x), -1))
    cosine, sine = widen(cosine)[:, None], widen(sine)[:, None]
    outputs = []
    for tensor in (query, key):
        heads = tensor.float().unflatten(1, (-1, head_size))
        turning, rest = heads.split([cosine.shape[-1], head_size - cosine.shape[-1]], dim=-1)
        result = turning * cosine + turned(turning, rotary_mode) * sine
        outputs.append(torch.cat((result, rest), dim=-1).flatten(1).to(tensor.dtype))
    return outputs[0], outputs[1]


def _axis_of_pair(sections: list[int], cache_mode: str) -> list[int]:
    """Which of the three axes each pair of channels follows."""
    if cache_mode == "default":  # time, then height, then width
        return [axis for axis, size in enumerate(sections) for _ in range(size)]
    axis_of = [0] * sum(sections)
    for axis in (1, 2):  # every third pair, as long as the section lasts
        for pair in range(axis, sections[axis] * 3, 3):
            axis_of[pair] = axis
    return axis_of
