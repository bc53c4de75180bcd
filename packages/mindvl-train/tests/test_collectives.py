# SPDX-License-Identifier: Apache-2.0
"""Collectives are noticed while a run trains, and torch is as before when it ends."""

import threading

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from mindvl_model import enter
from mindvl_train.collectives import last_collective, watched_collectives
from mindvl_train.parallel import process_groups
from mindvl_train.step_clock import StepClock, current_phase


def test_the_last_collective_is_known_by_name_and_group_until_the_run_ends() -> None:
    values = torch.ones(3)
    with process_groups(enter(), seed=0), watched_collectives():
        assert last_collective() is None
        dist.all_reduce(values)
        first = last_collective()
        handle = dist.broadcast(values, 0, async_op=True)
        second = last_collective()
        assert handle is not None
        handle.wait()
        assert current_phase() == "host"
    assert first is not None
    assert second is not None
    assert (first.name, second.name) == ("allreduce", "broadcast")
    assert first.group == second.group != ""
    assert first.started <= second.started
    assert last_collective() is None


def test_time_in_collectives_is_communication_but_for_those_of_another_thread() -> None:
    clock, values = StepClock(torch.device("cpu")), torch.ones(3)
    with process_groups(enter(), seed=0), watched_collectives():
        with clock.measure(True):
            dist.all_reduce(values)
        own = clock.take()
        with clock.measure(True):
            thread = threading.Thread(target=dist.all_reduce, args=(values,))  # as a save in the background does
            thread.start()
            thread.join()
        other = clock.take()
    assert own is not None
    assert other is not None
    assert own["communication"] > 0
    assert other["communication"] == 0


def test_torch_is_left_as_it_was() -> None:
    def methods() -> list[object]:
        return [vars(Work)["wait"], *(vars(ProcessGroup)[name] for name in ("allreduce", "broadcast", "send"))]

    before = methods()
    with process_groups(enter(), seed=0):
        with watched_collectives():
            assert methods() != before
        assert methods() == before
        values = torch.ones(2)
        dist.all_reduce(values)
        assert values.tolist() == [1.0, 1.0]
