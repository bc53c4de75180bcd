# SPDX-License-Identifier: Apache-2.0
"""Processes that train the same rows together agree on which samples count as bad.

Comes between loader and model. Tensor-, pipeline- and context-parallel peers each load their rows themselves, and only
those of the first stage decode pictures: what one of them cannot use, the others must not learn from either.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from mindvl_train.interfaces import Batch, BatchSource


def agree(rows: Sequence[Batch], source: BatchSource, peers: dist.ProcessGroup) -> list[Batch]:
    """The same rows, with a placeholder for every sample that any peer cannot use; all peers must ask together.

    One small message over the host. Rows are made again only where this process did not know of a bad sample.

    Args:
        rows: Of one step, the same on all peers.
        peers: A group that works on the host.
    """
    ends = [0, *accumulate(len(row.segments) for row in rows)]
    mine = torch.tensor([segment.bad for row in rows for segment in row.segments], dtype=torch.uint8)
    together = mine.clone()
    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=peers)
    agreed = []
    for row, (start, end) in zip(rows, pairwise(ends), strict=True):
        bad = together[start:end]
        agreed.append(row if torch.equal(mine[start:end], bad) else source.again(row, bad.bool().tolist()))
    return agreed
