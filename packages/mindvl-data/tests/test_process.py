# SPDX-License-Identifier: Apache-2.0
"""Process: in a forked process everything that holds threads or files says so at once, instead of hanging."""

import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset

from mindvl_data import DataConfig, DataError, Loader, decoding
from mindvl_data.images import decode
from mindvl_data.prefetch import Workers
from mindvl_data.process import OwnProcess
from mindvl_data.shards import remote
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import open_index

MakeConfig = Callable[..., DataConfig]


def in_fork(uses: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """What each use ends with in a forked process, which has to end by itself."""

    def child(connection: Connection) -> None:
        found = {}
        for name, use in uses.items():
            try:
                found[name] = f"returned {use()!r}"[:60]
            except DataError as error:
                found[name] = str(error)
        connection.send(found)

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    try:
        assert ours.poll(300), "the forked process hangs"
        found: dict[str, str] = ours.recv()
        process.join(60)
        assert process.exitcode == 0
        return found
    finally:
        process.kill()


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_loader_is_refused_in_a_fork_and_continues_where_it_was_made(
    make_config: MakeConfig, num_threads: int
) -> None:
    with Loader(make_config(num_threads=num_threads), global_batch_size=2, position_kind="rope") as loader:
        first, state = next(loader), loader.state_dict()
        found = in_fork(
            {
                "next": lambda: next(loader),
                "state_dict": loader.state_dict,
                "load_state_dict": lambda: loader.load_state_dict(state),
                "rebuild": lambda: loader.rebuild(first, [False] * len(first.samples)),
                "report": loader.report,
                "is_used_up": loader.is_used_up,
                "close": loader.close,
            }
        )
        assert found.pop("close") == "returned None"  # the end of a `with` block in a fork is no error
        expected = (
            rf"Loader: was created in process {os.getpid()} and is used in the forked process \d+, .* Create it in"
        )
        assert not [name for name, message in found.items() if not re.match(expected, message)]
        assert next(loader).step in (1, 2)


class Wrapped(IterableDataset[int]):
    """What somebody writes who takes the loader for a data set."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Any:
        return (batch.step for batch in self._loader)


def test_workers_of_a_dataloader_say_what_to_do(make_config: MakeConfig) -> None:
    with Loader(make_config(), global_batch_size=2, position_kind="rope") as loader:
        next(loader)
        inside = DataLoader(Wrapped(loader), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60)
        with pytest.raises(DataError, match="use PackedDataset in DataLoader workers"):
            next(iter(inside))


def test_open_files_mapped_indexes_and_threads_are_refused_in_a_fork(shard_directories: dict[str, Path]) -> None:
    files, workers = ShardFiles(), Workers(1, "test")
    shards = open_index(shard_directories["text"]).shards
    path = shards[0].path
    try:
        found = in_fork(
            {
                "ShardFiles": lambda: files.read(path, 0, 4),
                "ShardFiles ": lambda: files.read_again(path, 0, 4),
                "ShardFiles  ": files.report,
                "index": lambda: shards[0],
                "threads": lambda: workers.submit(int),
            }
        )
        assert [name for name, message in found.items() if "is used in the forked process" not in message] == []
        assert in_fork({"own": lambda: len(ShardFiles().read(path, 0, 4))}) == {"own": "returned 4"}
    finally:
        workers.close()
        files.close()


def test_memory_and_locks_that_threads_hold_are_free_in_a_fork() -> None:
    encoded = io.BytesIO()
    Image.new("RGB", (4, 2)).save(encoded, "PNG")

    def decode_image() -> tuple[int, ...]:
        return decode(encoded.getvalue(), decode_limit=8).shape

    with decoding._MEMORY.reserved(decoding.DECODING_BYTES), decoding._MEMORY._changed, remote._lock:
        found = in_fork({"decode": decode_image, "store": lambda: remote._lock.acquire(timeout=1)})
    assert found == {"decode": "returned (2, 4, 3)", "store": "returned True"}


def test_a_fork_that_ends_stops_no_threads_of_its_parent() -> None:
    workers = Workers(1, "test")
    try:
        assert in_fork({"close": workers.close}) == {"close": "returned None"}
        assert workers.submit(lambda: 7).result(30) == 7
    finally:
        workers.close()


def test_the_process_that_made_an_object_may_use_it() -> None:
    own = OwnProcess("Loader")
    own.check()
    assert own.is_current
    assert in_fork({"fork": lambda: own.is_current}) == {"fork": "returned False"}


POOL = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from mindvl_data.process import end_with_parent
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(100)
"""


def test_processes_of_a_pool_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "pool.py").write_text(POOL)
    parent = subprocess.Popen([sys.executable, tmp_path / "pool.py"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    number = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    for _ in range(1200):
        if not Path(f"/proc/{number}/cmdline").is_file() or not Path(f"/proc/{number}/cmdline").read_bytes():
            return  # gone, or a zombie
        time.sleep(0.1)
    os.kill(number, signal.SIGKILL)
    pytest.fail("the process outlived its parent")
