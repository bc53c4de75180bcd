# SPDX-License-Identifier: Apache-2.0
"""Recorded bytes of steps, and the release of tensors that gloo has sent."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from mindvl_train.layout_search.recorders import CpuRecorder, most_bytes, wait_for_collectives

NUM_MESSAGES = 1000


def test_a_block_without_a_release_event_counts_until_its_address_is_used_again() -> None:
    changes = [
        (1, 0xA, 100),
        (2, 0xB, 40),  # released by an unseen thread: no event
        (4, 0xC, 7),
        (5, 0xB, 30),
        (6, 0xC, -7),
        (7, 0xD, -9),  # given out before the recording
        (9, 0xD, 1000),
    ]
    assert most_bytes(changes, 3, 8) == (140, 147)
    assert most_bytes(changes, 5, 8) == (147, 137)  # 100 + 30 + 7: without the 40 of the earlier block


def test_tensors_made_inside_of_a_collective_are_not_counted() -> None:
    with CpuRecorder() as recorder:
        recorder.begin_step()
        kept = torch.empty(1000, dtype=torch.uint8)
        with torch._C._profiler._RecordFunctionFast("c10d::allgather_"):
            copied = torch.empty(50000, dtype=torch.uint8)
        recorder.end_step()
    between, peak = recorder.result()
    assert between == 0
    assert peak == kept.nbytes
    assert copied.nbytes == 50000


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_no_thread_holds_the_tensors_of_a_collective_that_has_returned(gloo: None) -> None:
    with wait_for_collectives():
        for _ in range(NUM_MESSAGES):  # without the wait, every tenth tensor or so is still held
            sent, received = torch.zeros(1000), torch.empty(1000)
            before = sent._use_count(), received._use_count()
            dist.all_to_all_single(received, sent)
            assert (sent._use_count(), received._use_count()) == before


def test_collectives_keep_their_results_and_handles(gloo: None) -> None:
    total, gathered = torch.ones(3), torch.empty(3)
    with wait_for_collectives():
        dist.all_reduce(total)
        handle = dist.all_gather_into_tensor(gathered, total, async_op=True)
        handle.wait()
        with pytest.raises(RuntimeError, match="invalid root rank"):
            dist.broadcast(total, src=7)
    assert gathered.tolist() == total.tolist() == [1, 1, 1]
