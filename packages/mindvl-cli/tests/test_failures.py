# SPDX-License-Identifier: Apache-2.0
"""Tests of exit codes and of what a failing command prints."""

import errno
import shlex
import subprocess
import sys

import click
import pytest

from mindvl_cli.failures import CliError, is_ours, one_line, run_guarded
from mindvl_cli.problems import ConfigError, Problem


def _raising(error: BaseException) -> int:
    def invoke() -> None:
        raise error

    return run_guarded(invoke)


def _foreign_error(name: str, module: str) -> type[Exception]:
    return type(name, (Exception,), {"__module__": module})


def test_success_is_zero_and_a_given_exit_code_is_kept() -> None:
    assert run_guarded(lambda: None) == 0
    assert run_guarded(lambda: 1) == 1


def test_our_error_is_one_line_on_stderr_and_exit_code_one(capsys: pytest.CaptureFixture[str]) -> None:
    data_error = _foreign_error("DataError", "mindvl_data.errors")
    child = type("ShardError", (data_error,), {"__module__": "mindvl_data.shards"})

    assert _raising(child("shard a.tar is cut off\n  at byte 7. Write it again.")) == 1
    assert capsys.readouterr() == ("", "error: shard a.tar is cut off at byte 7. Write it again.\n")


def test_an_error_of_the_same_name_from_elsewhere_is_not_ours() -> None:
    assert not is_ours(_foreign_error("DataError", "pandas.errors")("x"))
    assert is_ours(CliError("x"))


def test_an_error_that_is_not_ours_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_guarded(lambda: 1 // 0)


def test_wrong_usage_is_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert _raising(click.UsageError("no such thing")) == 2
    assert "no such thing" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_an_interrupted_command_is_130(error: BaseException) -> None:
    assert _raising(error) == 130


def test_a_config_error_keeps_one_line_for_each_problem() -> None:
    error = ConfigError([Problem("a", "x", "is bad", "Correct it."), Problem("b", "y", "is worse", "Drop it.")])

    assert one_line(error) == "error: a: x: is bad. Correct it.\nerror: b: y: is worse. Drop it."


def test_an_error_of_a_command_may_have_several_lines_too() -> None:
    assert str(CliError("no x.\n Make it.")) == "no x.\n Make it."
    assert one_line(CliError("no x.\n Make it.", "no y.")) == "error: no x. Make it.\nerror: no y."


def test_an_error_shows_neither_secrets_nor_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    assert _raising(CliError("s3://me:pa55@b/\x1b[2J.tar: is missing.\nerror: forged")) == 1
    assert capsys.readouterr().err == "error: s3://***@b/\\x1b[2J.tar: is missing. error: forged\n"
    assert _raising(click.BadParameter("s3://me:pa55@b/\x9d0;x\x07 does not exist")) == 2
    assert r"s3://***@b/\x9d0;x\x07 does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "operating system: No space left on device. Free space on that disk or choose another one, and start "
            "the same command again.",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/x/model"),
            "/x/model: Permission denied. Choose another path, or change its permissions.",
        ),
        (OSError("stale"), "operating system: stale. Check the path and the disk, and start the same command again."),
    ],
)
def test_an_operating_system_error_is_one_line(
    error: OSError, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _raising(error) == 1
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_reader_that_ends_early_is_no_traceback() -> None:
    command = [sys.executable, "-m", "mindvl_cli.main", "--help"]
    done = subprocess.run(f"{shlex.join(command)} | true", shell=True, capture_output=True, text=True)
    assert done.stderr == ""
