# SPDX-License-Identifier: Apache-2.0
"""What one process cannot use none of its peers learns from, over gloo on loopback."""

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
    from mindvl_train.peers import agree

    rank, address = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)

    def row(name, *bad):
        return SimpleNamespace(name=name, segments=[SimpleNamespace(bad=flag) for flag in bad])

    class Source:
        def again(self, batch, bad):
            return row(batch.name + " again", *bad)

    mine = [
        [row("a", False, True), row("b", False), row("c"), row("d", True, False, False)],
        [row("a", False, True), row("b", True), row("c"), row("d", False, False, True)],
    ][rank]
    agreed = agree(mine, Source(), dist.group.WORLD)
    print(json.dumps([[one.name, [segment.bad for segment in one.segments]] for one in agreed]))
    dist.destroy_process_group()
"""


@pytest.mark.multi
def test_a_sample_is_left_out_by_all_peers_and_rows_are_made_again_only_where_news_came(tmp_path: Path) -> None:
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
        first, second = (json.loads(worker.communicate(timeout=100)[0].splitlines()[-1]) for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
    assert [flags for _, flags in first] == [flags for _, flags in second]
    assert first == [["a", [False, True]], ["b again", [True]], ["c", []], ["d again", [True, False, True]]]
    assert second == [["a", [False, True]], ["b", [True]], ["c", []], ["d again", [True, False, True]]]
