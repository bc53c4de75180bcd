# SPDX-License-Identifier: Apache-2.0
"""Ranks agree on the data order and on the samples that failed, over gloo on loopback."""

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
    from mindvl_train.agreement import agree_on_failed_samples, check_data_order

    rank, address = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)

    def pack(name, *failed):
        return SimpleNamespace(name=name, samples=[SimpleNamespace(failed=flag) for flag in failed])

    class Source:
        def rebuild(self, batch, failed):
            return pack(batch.name + " again", *failed)

    packs = [
        [pack("a", False, True), pack("b", False), pack("c"), pack("d", True, False, False)],
        [pack("a", False, True), pack("b", True), pack("c"), pack("d", False, False, True)],
    ][rank]
    agreed = agree_on_failed_samples(packs, Source(), dist.group.WORLD)
    check_data_order({"checksum": "ab", "identities": {}, "order": {"derived": [1.0]}})
    try:
        check_data_order(
            {"checksum": f"c{rank}", "identities": {"seed": "3"}, "order": {"derived": [0.5, rank]}}
        )
    except TrainError as error:
        print(error)
    print(json.dumps([[one.name, [sample.failed for sample in one.samples]] for one in agreed]))
    dist.destroy_process_group()
"""


@pytest.mark.multi
def test_ranks_mask_the_same_samples_and_different_data_orders_are_refused(tmp_path: Path) -> None:
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
        lines = [worker.communicate(timeout=400)[0].splitlines() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for refused, _ in lines:
        assert refused.startswith(
            "rank 1: its data order differs from that of rank 0: mixture figures is [0.5, 1] instead of [0.5, 0]. "
            "Use the same data"
        )
    first, second = (json.loads(agreed) for _, agreed in lines)
    assert [flags for _, flags in first] == [flags for _, flags in second]
    assert first == [["a", [False, True]], ["b again", [True]], ["c", []], ["d again", [True, False, True]]]
    assert second == [["a", [False, True]], ["b", [True]], ["c", []], ["d again", [True, False, True]]]
