# SPDX-License-Identifier: Apache-2.0
"""Answers on disk and limits between processes, one of which is killed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mindvl_data.curation.endpoint_store import AnswerStore, BudgetError, Expected, Limits, Reply, _rate_wait

_ANSWERS_AND_DIES = """
import os, signal, sys
from pathlib import Path
from mindvl_data.curation.endpoint_store import AnswerStore, Expected, Limits, Reply
store, expected = AnswerStore(Path(sys.argv[1])), Expected(30, 0.5, 1000.0)
for key in ("answered", "lost"):
    assert store.admit(key, "e", Limits(concurrency=2), expected, 0.0) == 0.0
store.answered("answered", "e", Reply("paid", "stop", 3, 4), 0.25)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_answer_survives_kill_and_a_lost_request_frees_its_place(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", _ANSWERS_AND_DIES, str(tmp_path)], check=False)
    assert process.returncode == -signal.SIGKILL
    store = AnswerStore(tmp_path)
    assert store.find("answered") == Reply("paid", "stop", 3, 4, cached=True)
    limits, expected = Limits(concurrency=1), Expected(30, 0.5, 1000.0)
    assert store.admit("answered", "e", limits, expected, 1.0) == Reply("paid", "stop", 3, 4, cached=True)
    assert store.admit("lost", "e", limits, expected, 1.0) == 0.0  # at once, not after its timeout
    # three requests; 7 tokens for the answer and 30 for the lost request, which the server may have charged
    assert store.spent("e") == (3, 37, 0.75)


def test_a_question_in_flight_is_waited_for(tmp_path: Path) -> None:
    first, second = AnswerStore(tmp_path), AnswerStore(tmp_path)
    limits, expected = Limits(concurrency=9), Expected(1, 0.0, 10.0)
    assert first.admit("q", "e", limits, expected, 0.0) == 0.0
    assert second.admit("q", "e", limits, expected, 0.0) == pytest.approx(0.1)
    first.answered("q", "e", Reply("a", "stop", 1, 1), 0.0)
    assert second.admit("q", "e", limits, expected, 0.0) == Reply("a", "stop", 1, 1, cached=True)


def test_a_request_waits_while_those_in_flight_may_use_the_rest_of_the_budget(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    limits, expected = Limits(concurrency=9, budget_tokens=100), Expected(60, 0.0, 10.0)
    assert store.admit("a", "e", limits, expected, 0.0) == 0.0
    assert store.admit("b", "e", limits, expected, 0.0) == pytest.approx(0.1)  # 60 reserved + 60 > 100
    store.answered("a", "e", Reply("", "stop", 20, 20), 0.0)
    assert store.admit("b", "e", limits, expected, 0.0) == 0.0  # 40 used + 60
    store.failed("b", "e", 1, 0.0)
    with pytest.raises(BudgetError, match="41 of 100 are used, and the next request may need 60"):
        store.admit("c", "e", limits, expected, 0.0)


def test_endpoints_have_their_own_limits(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    limits, expected = Limits(concurrency=1), Expected(1, 0.0, 10.0)
    store.pause("e", 50.0)
    assert store.admit("a", "e", limits, expected, 20.0) == 30.0
    assert store.admit("a", "f", limits, expected, 20.0) == 0.0
    store.pause("e", 40.0)  # does not shorten a pause
    assert store.admit("b", "e", limits, expected, 20.0) == 30.0


def test_the_wait_for_a_rate_ends_when_enough_of_the_last_minute_has_passed() -> None:
    used = [(0.0, 30), (10.0, 30), (20.0, 30)]
    assert _rate_wait(used, 10, 100, 30.0) == 0.0
    assert _rate_wait(used, 40, 100, 30.0) == 30.0  # until 60, when the first 30 no longer count
    assert _rate_wait(used, 41, 100, 30.0) == 40.0
    assert _rate_wait(used, 1000, 100, 30.0) == 50.0
    assert _rate_wait([], 1000, 100, 30.0) == 0.0
    assert _rate_wait(used, 1000, None, 30.0) == 0.0
