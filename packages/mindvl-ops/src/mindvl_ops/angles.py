# SPDX-License-Identifier: Apache-2.0
"""Cosine and sine of rotary embedding from positions: 1-D, M-RoPE, 2-D of a vision encoder.

Comes before `rotary`, once per packed sequence. Every kind uses one formula: pair `p` of a head is rotated by the
position along its axis times its frequency. Angles are float32: a 16-bit position is wrong from 257 on. Sources: Su et
al., "RoFormer", 2021; Wang et al., "Qwen2-VL", 2024 (three axes, sections; rows and columns of patches).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import OpsError


def rotary_tables(
    position_ids: Tensor, width: int, base: float, interleaved: bool = False, *, frequencies: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[T, D]` float32 for positions on one axis.

    Args:
        position_ids: `[T]`.
        width: `D`, even.
        base: Longest wavelength is `2 pi base`, nearly.
        interleaved: Neighbours repeat each other, for `rotary(..., interleaved=True)`; else the halves do.
        frequencies: `[D / 2]` in radians per position, in place of those of `base`.
    """
    if frequencies is None:
        frequencies = _frequencies(width, base, position_ids.device)
    return _both(position_ids.float()[:, None] * frequencies, interleaved)


def mrope_tables(
    position_ids: Tensor,
    width: int,
    base: float,
    sections: Sequence[int],
    interleaved: bool = False,
    *,
    alternating: bool = False,
    frequencies: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[T, D]` float32 for positions on three axes (M-RoPE).

    Args:
        position_ids: `[3, T]`: time, height, width.
        width: `D`, even.
        sections: Pairs of each axis, in order, from the highest frequency on; they add up to `D / 2` (Qwen2.5-VL:
            16, 24, 24).
        interleaved: Neighbours repeat each other, for `rotary(..., interleaved=True)`; else the halves do.
        alternating: Pair `p` belongs to axis `p % 3` as long as that axis has pairs left, otherwise to time (Qwen3-VL).
        frequencies: `[D / 2]` in radians per position, in place of those of `base`.

    Raises:
        OpsError: The sections do not add up to `D / 2`, or their number differs from that of the axes.
    """
    if len(sections) != len(position_ids) or 2 * sum(sections) != width:
        raise OpsError(
            f"mrope_tables: sections {tuple(sections)} do not fit {len(position_ids)} axes and width {width}. Give "
            f"one for each axis, {width // 2} in all."
        )
    by_axis = position_ids.float().unbind()  # no index tensor: it would be copied from the host
    if alternating:
        count = len(sections)
        axes = [pair % count if pair < count * sections[pair % count] else 0 for pair in range(width // 2)]
    else:
        axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
    positions = torch.stack([by_axis[axis] for axis in axes], dim=1)  # [T, D/2]
    if frequencies is None:
        frequencies = _frequencies(width, base, position_ids.device)
    return _both(positions * frequencies, interleaved)


def vision_tables(positions: Tensor, width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[P, D]` float32 for patches in a plane: a quarter of the head each for row and column, repeated.

    Args:
        positions: `[P, 2]` row and column of each patch.
        width: `D`, a multiple of 4.

    Raises:
        OpsError: The width is not a multiple of 4.
    """
    if width % 4:
        raise OpsError(
            f"vision_tables: width {width} is not a multiple of 4. Give a multiple of 4: row and column positions use a "
            "quarter of the head each."
        )
    angles = positions.float()[:, :, None] * _frequencies(width // 2, base, positions.device)  # [P, 2, D/4]
    return _both(angles.flatten(1), interleaved=False)


def _frequencies(width: int, base: float, device: torch.device) -> Tensor:
    """`[width / 2]`: 1, base^(-2/width), base^(-4/width), ..."""
    if width % 2:
        raise OpsError(f"rotary embedding: width {width} is odd. Use an even width, because pairs are rotated.")
    return 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)


def _both(angles: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    full = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    return full.cos(), full.sin()
