# SPDX-License-Identifier: Apache-2.0
"""Every command ends soon after a signal, with the exit code that says whether it continues when started again."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import click
import pytest

from mindvl_cli.commands.data import data
from mindvl_cli.failures import run_guarded
from mindvl_cli.interrupts import Stopped
from mindvl_cli.main import cli

pytestmark = pytest.mark.slow

# A command group as `mindvl` has it, whose commands wait in the ways that commands do.
PROGRAM = """
    import signal, sys, time, threading
    from concurrent.futures import ThreadPoolExecutor
    import click
    from mindvl_cli import interrupts, main

    # A shell without job control starts background work with interrupts ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[2] in ("pool", "swallowed"):  # the others end at the first exception, which a second one may interrupt
        interrupts._AGAIN_S = 0.3

    class Stubborn:
        def __del__(self):  # exceptions here are printed and forgotten
            ready()
            time.sleep(600)

    def ready():
        print("ready", flush=True)

    def plain():
        ready()
        time.sleep(600)

    def pool():
        with ThreadPoolExecutor(1) as threads:
            threads.submit(time.sleep, 600)
            ready()

    def swallowed():
        Stubborn()
        time.sleep(600)

    def cleans():
        try:
            plain()
        finally:
            print("cleaned", flush=True)

    def trained():  # a training that ends well in the step in which the signal comes
        from mindvl_train.signals import stop_requests
        with stop_requests() as asked:
            ready()
            while not asked():
                time.sleep(0.01)
        time.sleep(600)

    @click.command()
    def command():
        globals()[sys.argv[2]]()

    main.cli.get_command = lambda ctx, name: command
    sys.argv[1:] = [sys.argv[1], sys.argv[2]]
    command.params.append(click.Argument(["how"]))
    command.callback = lambda how: globals()[how]()
    main.main()
"""


def end(name: str, how: str, number: int) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command called `name` that gets a signal while it waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), name, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("name", "number", "code"),
    [
        ("demo", signal.SIGTERM, 75),
        ("eval", signal.SIGUSR1, 75),
        ("merge", signal.SIGTERM, 143),
        ("check", signal.SIGUSR1, 138),
        ("demo", signal.SIGINT, 130),
    ],
)
def test_a_command_cleans_up_and_ends_with_the_code_of_its_kind(name: str, number: int, code: int) -> None:
    exit_code, out, err = end(name, "cleans", number)
    assert (exit_code, out) == (code, "cleaned\n"), err
    assert len(err.split()) < 15
    assert "Traceback" not in err


@pytest.mark.parametrize("how", ["pool", "swallowed", "trained"])
def test_nothing_keeps_a_command_from_ending(how: str) -> None:
    assert end("demo", how, signal.SIGTERM)[0] == 75


@pytest.mark.parametrize(("name", "code"), [("write", 75), ("index", 75), ("stats", 143)])
def test_commands_of_data_that_continue_say_so(
    name: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop() -> None:
        raise Stopped(signal.SIGTERM)

    monkeypatch.setitem(data.commands, name, click.Command(name, callback=stop))
    assert run_guarded(lambda: cli.main(["data", name], prog_name="mindvl", standalone_mode=False)) == code
    assert ("to continue" in capsys.readouterr().err) == (code == 75)


def test_the_message_says_whether_the_command_continues() -> None:
    stopped = Stopped(signal.SIGTERM)
    stopped.command = ("data", "index")
    assert str(stopped) == "mindvl: stopped by SIGTERM. Start the same command again to continue."
    stopped.command = ("data", "stats")
    assert str(stopped) == "mindvl: stopped by SIGTERM. Start the same command again."
    assert stopped.exit_code == 143


def test_a_demo_ends_within_its_stage(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mindvl_cli.main", "demo", "--quick", "--out", str(tmp_path / "demo")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 300
        while "== data" not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        process.terminate()
        assert process.wait(300) == 75
    log = (tmp_path / "log").read_text()
    assert log.rstrip().endswith("mindvl: stopped by SIGTERM. Start the same command again to continue.")
    assert "Traceback" not in log
    assert (tmp_path / "demo/stages/tokenizer.json").is_file()
    assert not (tmp_path / "demo/stages/data.json").exists()
