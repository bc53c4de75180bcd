# SPDX-License-Identifier: Apache-2.0
"""Agreement between ranks on the data: one data order, and the same failed samples within a model-parallel group.

Comes between loader and model. The ranks of a model-parallel group load their packs independently, and only those of the
first stage decode images. If a sample fails to decode on one rank, every rank of its model-parallel group masks it.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from mindvl_train.errors import TrainError
from mindvl_train.interfaces import Batch, BatchSource


def agree_on_failed_samples(packs: Sequence[Batch], source: BatchSource, group: dist.ProcessGroup) -> list[Batch]:
    """The same packs with a placeholder for every sample that failed on any rank; collective over the group.

    Costs one small all-reduce. A pack is built again only if a sample failed on another rank but not on this one.

    Args:
        packs: Packs of one step, the same on all ranks of the group.
        group: Model-parallel group with a host backend.
    """
    ends = [0, *accumulate(len(pack.samples) for pack in packs)]
    local = torch.tensor([sample.failed for pack in packs for sample in pack.samples], dtype=torch.uint8)
    combined = local.clone()
    dist.all_reduce(combined, op=dist.ReduceOp.MAX, group=group)
    agreed = []
    for pack, (start, end) in zip(packs, pairwise(ends), strict=True):
        failed = combined[start:end]
        agreed.append(pack if torch.equal(local[start:end], failed) else source.rebuild(pack, failed.bool().tolist()))
    return agreed


def check_data_order(state: dict[str, Any]) -> None:
    """Check that all ranks have the same data order; collective over all ranks.

    Each rank computes the data order itself. It differs if a machine has other data, another tokenizer, or a library
    with different results; samples would then be lost or repeated without an error.

    Args:
        state: Ledger state of a new loader.

    Raises:
        TrainError: On every rank; it names the first rank that differs from rank 0 and the difference.
    """
    checksums: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(checksums, state["checksum"])
    other = next((rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]), None)
    if other is None:
        return
    details: list[Any] = [None] * len(checksums)  # a few kilobytes per rank, once, because the run ends here
    dist.all_gather_object(details, {**state["identities"], "mixture figures": state["order"].get("derived")})
    expected, actual = details[0], details[other]
    differences = [
        f"{name} is {actual.get(name)} instead of {expected.get(name)}"
        for name in sorted(expected.keys() | actual.keys())
        if expected.get(name) != actual.get(name)
    ]
    raise TrainError(
        f"rank {other}: its data order differs from that of rank 0: {'; '.join(differences) or 'another position'}. "
        "Use the same data, recipe, tokenizer and versions of mindvl-data and its dependencies on every machine."
    )
