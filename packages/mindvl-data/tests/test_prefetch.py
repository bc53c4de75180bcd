# SPDX-License-Identifier: Apache-2.0
"""Work ahead of the step: order, failures, and that nothing ever waits for a thread that hangs."""

import gc
import subprocess
import sys
import threading
import traceback
from typing import Any

import pytest

from mindvl_data import prefetch
from mindvl_data.prefetch import OrderPrefetcher, Workers


class Counting:
    """Plans the numbers 1, 2, ... up to `last`; fails at `failing`."""

    def __init__(self, *, last: int = 10, failing: int | None = None) -> None:
        self.step, self.last, self.failing = 0, last, failing
        self.threads: set[str] = set()

    def next_step(self) -> Any:
        self.threads.add(threading.current_thread().name)
        self.step += 1
        if self.step == self.failing:
            raise KeyError("broken order")
        return self.step if self.step <= self.last else None


def take(prefetcher: OrderPrefetcher, count: int) -> list[Any]:
    return [prefetcher.next_step() for _ in range(count)]


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_steps_come_in_order_and_the_end_stays_the_end(num_steps: int) -> None:
    data_order = Counting(last=6)
    prefetcher = OrderPrefetcher(data_order, num_steps=num_steps)  # type: ignore[arg-type]
    assert take(prefetcher, 8) == [1, 2, 3, 4, 5, 6, None, None]
    assert data_order.threads == {threading.current_thread().name} if num_steps == 0 else {"mindvl-order-0"}
    prefetcher.close()


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_failing_plan_fails_at_its_step_with_its_traceback_and_again(num_steps: int) -> None:
    prefetcher = OrderPrefetcher(Counting(failing=3), num_steps=num_steps)  # type: ignore[arg-type]
    assert take(prefetcher, 2) == [1, 2]
    for _ in range(2):
        with pytest.raises(KeyError, match="broken order") as caught:
            prefetcher.next_step()
        assert 'raise KeyError("broken order")' in "".join(traceback.format_exception(caught.value))
    prefetcher.close()


def test_only_as_many_steps_are_planned_as_were_asked_for() -> None:
    data_order = Counting(last=100)
    prefetcher = OrderPrefetcher(data_order, num_steps=5)  # type: ignore[arg-type]
    assert not prefetcher.is_ready
    assert data_order.step == 0  # nothing before the first step is wanted: a state may still be loaded
    take(prefetcher, 2)
    prefetcher.finish()
    assert data_order.step <= 7


def test_no_step_is_lost_when_waiting_for_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetcher = OrderPrefetcher(Counting(), num_steps=2)  # type: ignore[arg-type]
    take(prefetcher, 1)
    with monkeypatch.context() as patched:
        patched.setattr(prefetch.Future, "result", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prefetcher.next_step()
    assert take(prefetcher, 2) == [2, 3]
    prefetcher.close()


def test_closing_leaves_a_job_that_hangs_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_JOIN_TIMEOUT_S", 0.05)
    workers, hang, began = Workers(2, "test"), threading.Event(), threading.Barrier(3)

    def job() -> None:
        began.wait()
        hang.wait()

    running = [workers.submit(job) for _ in range(2)]
    waiting = workers.submit(lambda: 1)
    began.wait()
    workers.close()
    assert waiting.cancelled()
    assert not any(future.done() for future in running)
    with pytest.raises(RuntimeError, match="its threads were stopped"):
        workers.submit(lambda: 1)
    hang.set()
    assert [future.result() for future in running] == [None, None]


@pytest.mark.slow
def test_threads_end_with_the_last_reference() -> None:
    workers = Workers(2, "forgotten")
    assert [workers.submit(lambda number=number: number).result() for number in range(3)] == [0, 1, 2]
    del workers
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("forgotten")]


HANGING = """
import threading
from mindvl_data import prefetch
prefetch._JOIN_TIMEOUT_S = 0.05
workers = prefetch.Workers(1, "test")
began = threading.Event()
workers.submit(lambda: (began.set(), threading.Event().wait()))
began.wait()
print("the end")
"""


def test_the_interpreter_ends_although_a_thread_hangs() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout == "the end\n"
    assert ended.stderr == ""
