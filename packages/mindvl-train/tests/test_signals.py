# SPDX-License-Identifier: Apache-2.0
"""Tests of being asked to save and end."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from mindvl_train.signals import SAVE_AND_END, handled_by, stop_requests


@pytest.mark.parametrize("number", SAVE_AND_END)
def test_a_signal_is_remembered_inside_the_block_and_handled_as_before_after_it(number: signal.Signals) -> None:
    seen: list[int] = []
    before = signal.signal(number, lambda number, frame: seen.append(number))
    try:
        with stop_requests() as asked:
            assert not asked()
            for _ in range(2):  # a second one changes nothing
                os.kill(os.getpid(), number)
                assert asked()
        assert seen == [number]  # reported once, when the block is over
        os.kill(os.getpid(), number)
        assert seen == [number, number]
        with stop_requests(forward=False):
            os.kill(os.getpid(), number)
        with stop_requests():
            pass
        assert seen == [number, number]
    finally:
        signal.signal(number, before)


def test_a_signal_between_two_runs_of_a_plan_stops_the_next_one() -> None:
    with stop_requests() as plan:
        with stop_requests() as run:
            assert not run()
        os.kill(os.getpid(), signal.SIGTERM)
        with stop_requests() as run:
            assert run()
        assert plan()
    with stop_requests() as asked:
        assert not asked()


def test_in_another_thread_no_handler_is_touched() -> None:
    before = [signal.getsignal(number) for number in SAVE_AND_END]
    inside: list[object] = []

    def block() -> None:
        with handled_by(signal.SIG_IGN):
            inside.extend(signal.getsignal(number) for number in SAVE_AND_END)

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert inside == before


@pytest.mark.slow
def test_a_process_that_has_saved_keeps_its_exit_code() -> None:
    code = (
        "import os, signal, sys\n"
        "from mindvl_train.signals import STOPPED, ignore_from_now_on\n"
        "ignore_from_now_on()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(STOPPED)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 75
