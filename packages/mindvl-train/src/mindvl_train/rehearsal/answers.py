# SPDX-License-Identifier: Apache-2.0
"""The rule for everything that a rehearsed rank would learn from its device or from other ranks.

Every other rank answers as this rank would in its place: it gives the same objects, tensors of the same sizes, and
numbers that let training continue. Routed tokens are spread evenly over experts. This is the only file that decides it.
"""

from typing import Any

import torch
from torch import Tensor

from mindvl_train.rehearsal.sources import running

ASSUMPTIONS = (
    "all_gather_object: every rank gives the object of this rank",
    "numbers that the host reads from the device are 1, flags are true, arrays that it copies are 0; no rank asks to stop",
    "routed tokens are spread evenly over the experts and over the expert-parallel ranks",
    "every pack of the step has the largest size that the recipe allows",
)
NOT_COVERED = (
    "workspaces of kernels and of the collective library (HCCL, NCCL), the context of the device driver",
    "fragmentation of the allocator and temporary tensors inside of composite kernels",
    "loading of data, tokenizers, initial weights and checkpoints; writing of checkpoint files",
    "validation and its answers to prompts",
    "how long a message waits for another rank",
)


def objects_of_all(mine: Any, num_ranks: int) -> list[Any]:
    """What all_gather_object returns on a group."""
    return [mine] * num_ranks


def number_of(value: Tensor) -> bool | int | float:
    """What the host reads from a scalar on the device."""
    if running("any_rank")[0]:
        return False
    return True if value.dtype == torch.bool else 1.0 if value.dtype.is_floating_point else 1


def numbers_of(value: Tensor) -> Any:
    """What the host reads from an array on the device."""
    function, known = running("_routed", "host_sizes", "reduce_totals")
    if function == "reduce_totals":  # the last two numbers count overflows and requests to stop
        return [1.0] * (len(value) - 2) + [0.0, 0.0]
    if function == "_routed":  # rows to and from each expert-parallel rank
        return _exchanged(len(known["rows"]), known["self"].num_experts, known["self"].ep_size, known["group"].rank())
    if function == "host_sizes":  # rows of each expert
        return _spread(known["num_rows"], len(value))
    return _nested(list(value.shape), number_of(value))


def _exchanged(num_rows: int, num_experts: int, ep_size: int, ep_rank: int) -> list[list[int]]:
    """Rows that a rank sends to each rank, and rows that it receives from each: every rank sends the same numbers."""
    of_experts, each = _spread(num_rows, num_experts), num_experts // ep_size
    sent = [sum(of_experts[first : first + each]) for first in range(0, num_experts, each)]
    return [sent, [sent[ep_rank]] * ep_size]


def _spread(total: int, places: int) -> list[int]:
    return [total // places + (place < total % places) for place in range(places)]


def _nested(shape: list[int], number: Any) -> Any:
    """Lists of lists with one number."""
    return [_nested(shape[1:], number) for _ in range(shape[0])] if shape else number
