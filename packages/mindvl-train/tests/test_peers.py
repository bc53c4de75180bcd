# SPDX-License-Identifier: Apache-2.0
"""Processes agree on the order of the data and on which samples count as bad, over gloo on loopback."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

WORKER = """
    import json, sys
    from types import SimpleNamespace
    import torch.distributed as dist
    from mindvl_train import TrainError
    from mindvl_train.peers import agree, refuse_different_orders

    rank, address = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)

    def pack(name, *failed):
        return SimpleNamespace(name=name, samples=[SimpleNamespace(failed=flag) for flag in failed])

    class Source:
        def rebuild(self, batch, failed):
            return pack(batch.name + " again", *failed)

    mine = [
        [pack("a", False, True), pack("b", False), pack("c"), pack("d", True, False, False)],
        [pack("a", False, True), pack("b", True), pack("c"), pack("d", False, False, True)],
    ][rank]
    agreed = agree(mine, Source(), dist.group.WORLD)
    refuse_different_orders({"checksum": "ab", "identities": {}, "plan": {"derived": [1.0]}})
    try:
        refuse_different_orders(
            {"checksum": f"c{rank}", "identities": {"seed": "3"}, "plan": {"derived": [0.5, rank]}}
        )
    except TrainError as error:
        print(error)
    print(json.dumps([[one.name, [sample.failed for sample in one.samples]] for one in agreed]))
    dist.destroy_process_group()
"""


@pytest.mark.multi
def test_peers_leave_out_the_same_samples_and_other_orders_are_refused(tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'store'}"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WORKER), str(rank), address],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        lines = [worker.communicate(timeout=100)[0].splitlines() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for refused, _ in lines:
        assert refused.startswith(
            "process 1: its data order differs from that of process 0: mixture figures is [0.5, 0] there and [0.5, 1] "
            "here. Give every machine"
        )
    first, second = (json.loads(agreed) for _, agreed in lines)
    assert [flags for _, flags in first] == [flags for _, flags in second]
    assert first == [["a", [False, True]], ["b again", [True]], ["c", []], ["d again", [True, False, True]]]
    assert second == [["a", [False, True]], ["b", [True]], ["c", []], ["d again", [True, False, True]]]
