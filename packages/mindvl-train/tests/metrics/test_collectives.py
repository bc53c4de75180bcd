# SPDX-License-Identifier: Apache-2.0
"""Collectives are noticed while it is wanted, and torch is as before when it ends."""

import threading

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from mindvl_model import set_up_device
from mindvl_train.metrics.collectives import watch_collectives
from mindvl_train.parallel_state import process_groups


def test_a_collective_and_the_wait_for_it_are_detected_and_those_of_another_thread_are_not() -> None:
    events: list[str] = []
    values = torch.ones(3)
    with process_groups(set_up_device(), seed=0):
        restore = watch_collectives(events.append, lambda: events.append("end"))
        dist.all_reduce(values)
        assert events == ["communication", "end"] * 2  # the call and the wait
        events.clear()
        handle = dist.broadcast(values, 0, async_op=True)
        assert events == ["communication", "end"]
        assert handle is not None
        handle.wait()
        assert events == ["communication", "end"] * 2
        events.clear()
        thread = threading.Thread(target=dist.all_reduce, args=(values,))
        thread.start()
        thread.join()
        restore()
        dist.all_reduce(values)
        assert events == []


def test_torch_is_left_as_it_was() -> None:
    def methods() -> list[object]:
        return [vars(Work)["wait"], *(vars(ProcessGroup)[name] for name in ("allreduce", "broadcast", "send"))]

    before = methods()
    with process_groups(set_up_device(), seed=0):
        restore = watch_collectives(lambda kind: None, lambda: None)
        assert all(one is not other for one, other in zip(methods(), before, strict=True))
        restore()
        assert methods() == before
        values = torch.ones(2)
        dist.all_reduce(values)
        assert values.tolist() == [1.0, 1.0]
