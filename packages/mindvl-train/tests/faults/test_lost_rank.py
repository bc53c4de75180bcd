# SPDX-License-Identifier: Apache-2.0
"""The error of a rank whose peer has ended."""

from pathlib import Path

import pytest
import torch.distributed as dist

from mindvl_train.errors import TrainError
from mindvl_train.faults.lost_rank import lost_ranks_named

CLOSED = "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1459. GLHF!"


@pytest.mark.parametrize("error", [RuntimeError(CLOSED), dist.DistBackendError("NCCL error: remote process exited")])
def test_a_lost_connection_names_the_rank_and_the_logs_in_one_line(error: RuntimeError) -> None:
    lost = pytest.raises(TrainError, match=r"^rank 3: the connection to another rank was lost")
    with lost as caught, lost_ranks_named(Path("runs/a"), rank=3):
        raise error
    assert "runs/a/logs" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_other_errors_keep_their_type() -> None:
    with pytest.raises(RuntimeError, match="sizes differ"), lost_ranks_named(Path("runs/a"), rank=0):
        raise RuntimeError("sizes differ")
