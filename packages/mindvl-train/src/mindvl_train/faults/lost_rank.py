# SPDX-License-Identifier: Apache-2.0
"""Turn the error of a collective whose other side has ended into one line.

run.py wraps a run with it. The rank that ended first has its own message; every other rank fails in its next collective,
and its traceback shows nothing but the collective. The traceback is kept in the log of the rank.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from mindvl_train.errors import TrainError

logger = logging.getLogger(__name__)

_GLOO = "gloo/transport"  # gloo raises RuntimeError; its messages about connections name the file of their origin


@contextmanager
def lost_ranks_named(out: Path, *, rank: int) -> Iterator[None]:
    """Raise TrainError in place of an error of a collective that lost its connection.

    Args:
        out: Directory of the run, whose `logs` has one file for each rank.
        rank: Global rank of this process.

    Raises:
        TrainError: The connection to another rank was lost.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_lost_connection(error):
            raise
        logger.debug("the traceback of the lost connection", exc_info=error)
        logger.info("the connection was lost: %s", str(error).splitlines()[0][:300])
        raise TrainError(
            f"rank {rank}: the connection to another rank was lost in a collective, because that rank ended or the network "
            f"failed. Read the last lines of the logs in {out / 'logs'} for the rank that ended first; the same command "
            "resumes from the newest checkpoint."
        ) from error


def _is_lost_connection(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or _GLOO in str(error)
