# SPDX-License-Identifier: Apache-2.0
"""Processes agree on the data: all of them on its order, those that train the same packs on which samples count as bad.

Comes between loader and model. Tensor-, pipeline- and context-parallel peers each load their packs themselves, and only
those of the first stage decode images: what one of them cannot use, the others must not learn from either.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from mindvl_train.errors import TrainError
from mindvl_train.interfaces import Batch, BatchSource


def agree(packs: Sequence[Batch], source: BatchSource, peers: dist.ProcessGroup) -> list[Batch]:
    """The same packs, with a placeholder for every sample that any peer cannot use; all peers must ask together.

    One small message over the host. Packs are made again only where this process did not know of a bad sample.

    Args:
        packs: Of one step, the same on all peers.
        peers: A group that works on the host.
    """
    ends = [0, *accumulate(len(pack.samples) for pack in packs)]
    own = torch.tensor([sample.failed for pack in packs for sample in pack.samples], dtype=torch.uint8)
    together = own.clone()
    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=peers)
    agreed = []
    for pack, (start, end) in zip(packs, pairwise(ends), strict=True):
        failed = together[start:end]
        agreed.append(pack if torch.equal(own[start:end], failed) else source.rebuild(pack, failed.bool().tolist()))
    return agreed


def refuse_different_orders(state: dict[str, Any]) -> None:
    """Refuse to start where processes would train on different data orders; every process must ask at the same point.

    Each process computes the order by itself. It differs where a machine has another copy of the data, another
    tokenizer, or a library that computes otherwise; samples would then be lost and repeated without any other sign.

    Args:
        state: The ledger state of a fresh loader.

    Raises:
        TrainError: On every process; it names the first process that differs from process 0, and in what.
    """
    checksums: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(checksums, state["checksum"])
    other = next((rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]), None)
    if other is None:
        return
    decided: list[Any] = [None] * len(checksums)  # a few kilobytes from each, once, as the run ends here
    dist.all_gather_object(decided, {**state["identities"], "mixture figures": state["plan"].get("derived")})
    first, its = decided[0], decided[other]
    different = [
        f"{name} is {first.get(name)} there and {its.get(name)} here"
        for name in sorted(first.keys() | its.keys())
        if first.get(name) != its.get(name)
    ]
    raise TrainError(
        f"process {other}: its data order differs from that of process 0: {'; '.join(different) or 'its position'}. "
        "Give every machine the same data, recipe, tokenizer and versions of mindvl-data and its libraries."
    )
