# SPDX-License-Identifier: Apache-2.0
"""Tests of progress: lines where there is no terminal, a bar where there is one."""

import io
import sys

import pytest

from mindvl_cli import progress as progress_module
from mindvl_cli.progress import progress, reported_progress


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


def test_without_a_terminal_a_line_comes_every_ten_seconds(clock: _Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("write", total=100, unit="samples") as advance:
        for _ in range(4):
            clock.now += 5
            advance(25)

    assert capsys.readouterr().err.splitlines() == [
        "write: 50/100 samples, 5 samples/s, 0:10 left",
        "write: 100/100 samples, 5 samples/s",
        "write: 100/100 samples, 5 samples/s",
    ]


def test_an_unknown_total_shows_no_time_left(clock: _Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("scan", total=None, unit="files") as advance:
        clock.now += 2
        advance(3000)

    assert capsys.readouterr().err == "scan: 3000 files, 1,500 files/s\n"


def test_a_note_stays_until_the_next_one(clock: _Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("train", total=2, unit="steps") as advance:
        clock.now += 1
        advance(note="loss 1.50")
        advance()

    assert capsys.readouterr().err == "train: 2/2 steps, 2 steps/s, loss 1.50\n"


def test_what_an_earlier_start_did_does_not_count_in_the_rate(
    clock: _Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("train", total=1000, unit="steps", done=900) as advance:
        for _ in range(2):
            clock.now += 10
            advance(20)

    assert capsys.readouterr().err.splitlines()[:2] == [
        "train: 920/1000 steps, 2 steps/s, 0:40 left",
        "train: 940/1000 steps, 2 steps/s, 0:30 left",
    ]


def test_a_callback_opens_its_bar_once_the_length_is_known(clock: _Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with reported_progress("merge", unit="MB", scale=1e6) as report:
        report(0, 4_000_000)
        clock.now += 2
        report(1_000_000, 4_000_000)
        report(4_000_000, 4_000_000)

    assert capsys.readouterr().err == "merge: 4/4 MB, 2 MB/s\n"


def test_a_callback_that_is_never_called_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with reported_progress("eval", unit="answers"):
        pass

    assert capsys.readouterr().err == ""


def test_nothing_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("write", total=1) as advance:
        advance()

    assert capsys.readouterr().out == ""


def test_on_a_terminal_a_bar_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("write", total=4, unit="samples", done=1) as advance:
        advance(3, note="loss 0.5")

    assert "4/4 samples" in terminal.getvalue()
    assert "loss 0.5" in terminal.getvalue()


def test_an_error_inside_is_passed_on() -> None:
    with pytest.raises(ZeroDivisionError), progress("write", total=1):
        _ = 1 // 0
