# SPDX-License-Identifier: Apache-2.0
"""What one rank of 1,024 does at its start, without a cluster: process groups, index of a checkpoint, weights.

Run by start.py in a process of its own, or: python packages/mindvl-train/benchmarks/cluster.py [--quick]
The groups are counted with torch's fake backend; the index has as many chunks as a checkpoint of 1,024 ranks.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindvl_model import MindVLModel, set_up_device
from mindvl_model.accelerator.groups import initialize_groups
from mindvl_model.parallel_config import BuildConfig, ParallelConfig
from mindvl_model.parameters import initialize
from mindvl_model.testing.tiny import smallest_config

RANKS, CHUNKS, KEYS = 1024, 280_000, 100
LAYOUT = ParallelConfig(tp_size=2, pp_size=4, virtual_stages=4, ep_size=128)  # recipes/mindvl-671b-a37b


def main() -> None:
    """Print the measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the chunks")
    quick = parser.parse_args().quick
    set_up_device("cpu")
    print(json.dumps(groups() | index(CHUNKS // (10 if quick else 1)) | weights()))


def groups() -> dict[str, float]:
    """Number of groups that rank 0 takes part in creating, by megatron-core and by mindvl, and the time."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    created: list[Any] = []
    original = dist.new_group
    dist.new_group = lambda ranks, **options: created.append(ranks) or original(ranks, **{**options, "backend": "fake"})

    def counted(create: Callable[[], None]) -> tuple[int, float]:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
        created.clear()
        seconds = timed(create)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        return len(created), seconds

    everything = counted(
        lambda: parallel_state.initialize_model_parallel(
            LAYOUT.tp_size,
            LAYOUT.pp_size,
            LAYOUT.virtual_stages,
            expert_model_parallel_size=LAYOUT.ep_size,
            expert_tensor_parallel_size=1,
        )
    )
    ours = counted(lambda: initialize_groups(LAYOUT))
    dist.new_group = original
    return {"groups_before": everything[0], "groups": ours[0], "groups_s": ours[1]}


def index(num_chunks: int) -> dict[str, float]:
    """Processor time of joining the lists of all ranks and of reading the index, as a table and as torch's pickle."""
    from mindvl_train.checkpoints.chunk_table import TABLE, Chunk, ChunkTable
    from mindvl_train.checkpoints.torch_index import write_torch_index
    from mindvl_train.megatron.tensor_index import read_index

    def chunk(rank: int, number: int) -> Chunk:
        count = rank * (num_chunks // RANKS) + number
        key, row = f"optimizer.state.exp_avg.decoder.layers.{count % KEYS}.weight", count // KEYS
        return Chunk(
            key, [64, 256, 7168], "float32", [row % 64, row // 64, 0], [1, 1, 7168], f"__{rank}_0.distcp", count, 9, 7
        )

    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        paths = [directory / f"{rank:05d}.index" for rank in range(RANKS)]
        for rank, path in enumerate(paths):
            ChunkTable.of([chunk(rank, number) for number in range(num_chunks // RANKS)]).write(path)
        join_s = timed(lambda: ChunkTable.read_all(paths).write(directory / TABLE))
        read_s = timed(lambda: read_index(directory))
        table = ChunkTable.read(directory / TABLE)
        pickle_s = timed(lambda: write_torch_index(directory, table))
        (directory / TABLE).unlink()
        pickle_read_s = timed(lambda: read_index(directory))
    return {
        "chunks": num_chunks,
        "join_s": join_s,
        "read_s": read_s,
        "pickle_s": pickle_s,
        "pickle_read_s": pickle_read_s,
    }


def weights() -> dict[str, float]:
    """Processor time of drawing the weights, in seconds per billion parameters."""
    from dataclasses import replace

    from mindvl_model.megatron.process import single_process

    tiny = smallest_config()
    language = replace(tiny.language, hidden_size=1024, num_layers=4, ffn_hidden_size=4096)
    with single_process():
        model = MindVLModel(replace(tiny, language=language), BuildConfig())
        number = sum(one.numel() for one in model.parameters())
        seconds = timed(lambda: initialize(model, model.mindvl, 0))
    return {"draw_s_per_billion": seconds / number * 1e9}


def timed(action: Callable[[], Any]) -> float:
    """Processor time of an action in this process, in seconds."""
    begun = time.process_time()
    action()
    return time.process_time() - begun


if __name__ == "__main__":
    main()
